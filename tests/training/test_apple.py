"""training.device=mps: what is refused, and that torch has every operator of a UNet's training there, by its tables.

No such GPU was at hand: nothing here computes on one.
"""

import re
from pathlib import Path

import pytest
import torch
import torchgen
from diffusers import UNet2DConditionModel
from torch.utils._python_dispatch import TorchDispatchMode

from daguerre import devices
from daguerre.errors import UserError
from daguerre.training import device, meters
from daguerre.training.precision import dtypes
from daguerre.training.settings import TrainingSettings

MPS = torch.device("mps")
TABLE = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
"""torch's own table of operators: for each the devices that it was written for."""
EVERYWHERE = {"CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional"}


def of(**given):
    return TrainingSettings(duration="10 steps", **given)


def written_for() -> dict[str, set[str]]:
    """Devices by operator; those of one that is made of others are empty."""
    found, delegates = {}, {}
    for row in re.split(r"^- func: ", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name = row.partition("(")[0]
        table = row.partition("\n  dispatch:\n")[2]
        keys = re.findall(r"^    ([\w, ]+): ", table, flags=re.MULTILINE)
        found[name] = {key.strip() for each in keys for key in each.split(",")}
        if delegate := re.search(r"^  structured_delegate: (\S+)$", row, flags=re.MULTILINE):
            delegates[name] = delegate[1]
    return {name: keys | found.get(delegates.get(name, ""), set()) for name, keys in found.items()}


class Called(TorchDispatchMode):
    """Collects the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "aten":
            overload = operator._schema.overload_name
            self.names.add(f"{operator._schema.name.removeprefix('aten::')}{f'.{overload}' if overload else ''}")
        return operator(*args, **(kwargs or {}))


def test_torch_has_every_operator_of_a_unets_training():
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "layers_per_block": 1}
    blocks |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "block_out_channels": (32, 64)}
    with torch.device("meta"):
        net = UNet2DConditionModel(cross_attention_dim=16, attention_head_dim=8, **blocks)
        with Called() as called:
            loss = net(torch.randn(2, 4, 8, 8), torch.zeros(2), torch.randn(2, 7, 16)).sample.square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            torch.optim.AdamW(net.parameters()).step()
    table = written_for()
    assert {"MPS"} <= table["native_group_norm"] | table["convolution_overrideable"] | table["addmm.out"]
    lacking = {name for name in called.names if (keys := table[name]) and not keys & ({"MPS"} | EVERYWHERE)}
    assert len(called.names) > 40
    assert lacking == set()


def test_without_an_apple_gpu_it_is_refused_in_words():
    if torch.backends.mps.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="torch sees no Apple GPU"):
        device.choose_device("mps")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("compile", "blocks"), ("swap_blocks", 4), ("offload_activations", True), ("capture", True)),
        *(("base_precision", "int8"), ("float8", "rowwise")),
    ],
)
def test_what_it_cannot_is_refused_with_the_reason(name, value):
    assert {name} <= device.NOT_ON_APPLE.keys()
    with pytest.raises(UserError, match=rf"^training\.{name}={value} on training\.device=mps: "):
        device.prepare(of(**{name: value}), MPS)


def test_settings_as_they_are_and_types_are_accepted():
    device.prepare(of(), MPS)
    assert dtypes.choose(of(), MPS).compute == torch.float32
    assert dtypes.choose(of(mixed_precision="bf16"), MPS).compute == torch.bfloat16
    assert dtypes.available_kernels(torch.float32, MPS) == ("math",)
    with pytest.raises(UserError, match="an Apple GPU; there are math"):
        dtypes.choose(of(attention="flash"), MPS)
    with pytest.raises(UserError, match="no effect on an Apple GPU"):
        device.prepare(of(max_device_memory="8GB"), MPS)


def test_sums_are_of_the_widest_type_that_a_device_has(monkeypatch):
    assert [devices.widest(torch.device(name)) for name in ("cpu", "cuda", "mps")] == [torch.float64] * 2 + [
        torch.float32
    ]
    monkeypatch.setattr(devices, "widest", lambda where: torch.float32)  # as there: it has no float64
    meter = meters.Meter(torch.device("cpu"))
    meter.add_common("loss", torch.tensor(2.0))
    assert meter.state()["loss"].dtype == torch.float32
    meter.load({"loss": meter.state()["loss"].double()})  # of a checkpoint that a CPU wrote
    assert meter.read() == {"learning/loss": 2.0}
