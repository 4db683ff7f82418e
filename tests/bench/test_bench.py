"""`daguerre bench`: rows, ratios, and that it always ends with what was measured."""

import contextlib
import json
import os
import signal
import time

import pytest
import torch
from tiny_runs import TINY

from daguerre import errors
from daguerre.assembly.parts import outline
from daguerre.bench import inputs as bench_inputs
from daguerre.bench import options, random_model, report, timing, variants
from daguerre.bench.timing import Result, Rounds
from daguerre.cli import bench as bench_cli
from daguerre.cli import main
from daguerre.config.config import load
from daguerre.config.recipe import shipped
from daguerre.errors import UserError
from daguerre.training.performance import kernels
from daguerre.training.performance import peak_rates as measured

pytestmark = pytest.mark.usefixtures("few_objects")
CPU = torch.device("cpu")
QUICK = {"rounds": 2, "turn_seconds": 0.01, "soak_seconds": 0}
COUNT = variants.step_flops
COUNTED: dict[str, float] = {}
"""Arithmetic by the sections that it follows from."""
RATES = report.Rates({torch.float32: 1e12}, 1e10, None)


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """Quickly, and without a trace in the process. Arithmetic of the same networks is counted once for all tests."""

    def counted(config, parts):
        key = config.model_dump_json(include={"model", "objective", "adapters", "data"})
        return COUNTED[key] if key in COUNTED else COUNTED.setdefault(key, COUNT(config, parts))

    monkeypatch.setattr(variants, "step_flops", counted)
    monkeypatch.setattr(measured, "product_flops", lambda device, dtype: 1e11)
    monkeypatch.setattr(measured, "copy_bytes", lambda device: 1e10)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def bench(tmp_path, *given):
    """(exit code, document)."""
    out = tmp_path / "bench.json"
    named = {word.partition("=")[0] for word in given}
    quick = [f"{name}={value}" for name, value in QUICK.items() if name not in named]
    code = main.run(["bench", "quickstart", *TINY, *quick, f"out={out}", *given])
    return code, json.loads(out.read_text())


class Clock:
    """Time that passes where a contestant says so."""

    now = 0.0

    def read(self):
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch):
    """Time that only contestants let pass; they leave no garbage that would have to be looked for."""
    monkeypatch.setattr(time, "perf_counter", CLOCK.read)
    monkeypatch.setattr("daguerre.training.oom.gc.collect", lambda: 0)


class Fake:
    """A contestant of known speed."""

    samples, flops_per_sample, compute = 4, 1e6, torch.float32

    def __init__(self, seconds=0.001, fails_at=None, error=None):
        self.seconds, self.left, self.error, self.closed, self.done = seconds, fails_at, error, False, 0

    def begin(self):
        pass

    def step(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise self.error
        self.done += 1
        CLOCK.now += self.seconds * (1 + 0.01 * (self.done % 3))

    def waited(self):
        return 0.002

    def close(self):
        self.closed = True


def rounds(makers, **changed):
    numbers = {"rounds": 3, "turn_seconds": 0.004, "soak_seconds": 0, "budget_seconds": 30} | changed
    return Rounds(makers, CPU, say=lambda text: None, write=lambda: None, **numbers)


def test_rows_of_two_variants(tmp_path, capsys):
    code, found = bench(tmp_path, "variants={base: [], bare: [ema.enabled=false]}")
    assert code == errors.DONE
    assert found["complete"]
    assert [row["name"] for row in found["rows"]] == ["base", "bare"]
    for row in found["rows"]:
        assert row["samples"] == 2
        assert len(row["seconds"]) == len(row["cpu_seconds"]) == 2
        tflops = row["samples_per_second"] * row["flops_per_sample"] / 1e12
        assert row["model_tflops_per_second"] == pytest.approx(tflops)
        assert row["share_of_measured_rate"] == pytest.approx(tflops / 0.1)
        assert row["share_of_datasheet"] is None
    low, middle, high = (found["rows"][1]["speed_of_first"][name] for name in ("low", "median", "high"))
    assert low <= middle <= high
    assert found["variants"]["bare"] == ["ema.enabled=false"]
    assert "speed against base" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("inputs", ["pixels", "loader"])
def test_what_updates_are_given(tmp_path, inputs):
    code, found = bench(tmp_path, f"inputs={inputs}", "loader.num_workers=0", "rounds=1")
    assert code == errors.DONE
    wait = found["rows"][0]["data_wait_ms"]
    assert wait > 0.01 if inputs == "loader" else wait < 5


def test_the_frozen_networks_alone(tmp_path):
    code, found = bench(tmp_path, "part=encode", "rounds=1")
    assert code == errors.DONE
    assert found["rows"][0]["flops_per_sample"] > 1e6


def test_the_update_is_that_of_a_run(tmp_path):
    """Weights, averages and counts move as a run moves them; losses are finite."""
    request = options.read(["quickstart", *TINY, "training.matmul_precision=medium"])
    update = variants.Update(request.variants[0].config, request.options, tmp_path)
    torch.set_float32_matmul_precision("highest")
    update.begin()
    assert torch.get_float32_matmul_precision() == "medium"
    before = {name: p.detach().clone() for name, p in update.parts.net.named_parameters()}
    update.step()
    update.step()
    assert update.state.step == 2
    assert update.state.samples == 4
    assert 0 < update.loss() < 100
    moved = [name for name, p in update.parts.net.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) == len(before)
    assert all(not torch.equal(average, before[name]) for name, average in update.state.ema.averages.items())


def test_a_base_that_is_not_here_gets_random_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config, said = random_model.at_hand(load("sd15").config, tmp_path)
    assert "random weights" in said
    assert config.model.unet is None
    net = variants.outline(config).net
    assert sum(p.numel() for p in net.parameters()) == 859_520_964
    assert load("quickstart").config == random_model.at_hand(load("quickstart").config, tmp_path)[0]


def test_an_unknown_base_is_told(tmp_path):
    config = load("sd15", ["pretrained_model_name_or_path=nobody/nothing"]).config
    with pytest.raises(UserError, match="daguerre fetch nobody/nothing"):
        random_model.at_hand(config, tmp_path)


GIVEN = {
    "vae_finetune": ["data.path=images", "objective.perceptual.path=lpips"],
    "sdxl_lightning": ["data.name=null", "data.path=images"],
    "sd15_dreambooth": [],
    "cascade_c_controlnet_pose": ["data.path=images", "adapters.controlnet.condition.path=pose"],
    "cascade_c_controlnet_identity": [
        "data.path=images",
        "adapters.controlnet.condition.detector.path=a.onnx",
        "adapters.controlnet.condition.recogniser.path=b.onnx",
    ],
}
"""What recipes want to be given, whose networks are built; others: a folder."""
OF_A_RUN = (
    "quickstart_lora",
    "quickstart_controlnet",
    "quickstart_tokens",
    "quickstart_lcm",
    "quickstart_dpo",
    "quickstart_cascade_controlnet",
)
"""Recipes whose base is what the quickstart's run has exported."""
OF_EACH_KIND = ("cascade_previewer", "cascade_a", "sd15_textual_inversion", "flux_lora", "z_image_lora")


def stand_in(name, folder):
    try:
        config = load(name).config
    except UserError:
        config = load(name, GIVEN.get(name, ["data.path=images"])).config
    return random_model.at_hand(config, folder)[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OF_EACH_KIND else [pytest.mark.long])
        for name in shipped()
        if name not in OF_A_RUN
    ],
)
def test_every_recipe_has_a_stand_in(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    config = stand_in(name, tmp_path / "base")
    if name in OF_EACH_KIND:
        assert sum(p.numel() for p in variants.outline(config).net.parameters()) > 1e6


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_run_that_is_not_there_is_not_to_be_fetched(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"pipeline is not on this machine, .* Train or export it first"):
        stand_in(name, tmp_path)


def test_a_published_component_has_its_own_numbers(tmp_path, monkeypatch):
    """Beside a base that is on this machine."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert stand_in("vae_finetune", tmp_path).model.vae["block_out_channels"] == [128, 256, 512, 512]


@pytest.mark.long  # of the quick tests, it has a stand-in, whose networks are built
def test_what_denoises_nothing_is_timed_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    out = tmp_path / "bench.json"
    small = [
        "data.path=x",
        "data.resolution=128",
        "training.device=cpu",
        "training.global_batch_size=1",
        "training.per_device_batch_size=1",
    ]
    assert main.run(["bench", "cascade_previewer", *small, *(f"{n}={v}" for n, v in QUICK.items()), f"out={out}"]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["seconds"]


def test_components_of_a_benchmark_are_those_of_the_run():
    """Also after what they find out once is kept beside their fields."""
    parts = variants.build(load("quickstart", [*TINY]).config)
    assert parts.float32 == frozenset()
    inputs = bench_inputs.Inputs(iter(()), lambda components, net, batch: None)
    assert variants.SyntheticParts.around(parts, inputs).net is parts.net


def test_latents_are_cut_as_the_recipe_says():
    config = load("quickstart", [*TINY, "global_batch_size=6"]).config
    parts = variants.build(config)
    sizes = variants.batch_sizes(config)
    ring = bench_inputs.encoded_ring(config, parts, sizes, random_weights=True)
    update = next(bench_inputs.latents(sizes, ring).updates)
    assert [len(batch.names) for batch in update] == [2, 2, 2]
    assert len({batch.keys[0, 0] for batch in update}) == 3
    x0 = ring[0].x0_BCHW
    assert x0.shape == (2, 4, 16, 16)
    assert 0.9 < x0.std() < 1.1


def test_the_speed_of_contestants_is_found(clock):
    race = rounds({"slow": lambda: Fake(0.004), "fast": lambda: Fake(0.002)}, rounds=7, turn_seconds=0.02)
    race.run()
    found = report.between(race.results["slow"], race.results["fast"])
    assert found.low <= found.median <= found.high
    assert 1.98 < found.median < 2.02
    assert race.results["slow"].seconds[0] == pytest.approx(0.004, rel=0.02)
    assert race.results["fast"].peak_bytes is None
    told = report.document(race.results["fast"], race.results["slow"], RATES)
    assert told["data_wait_ms"] == pytest.approx(0.2, rel=0.05)


def test_contestants_take_turns_in_orders_that_turn_around(clock):
    said = []
    race = rounds({"a": Fake, "b": Fake}, rounds=3)
    race.say = said.append
    race.run()
    assert [text[0] for text in said if " of 3" in text] == list("baabba")


@pytest.mark.parametrize("at", [0, pytest.param(2, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)])
def test_memory_that_runs_out_leaves_a_row(clock, at):
    """While it is built, warmed up or timed: the others go on, and it is tried once more alone."""
    made = []

    def greedy():
        made.append(Fake(fails_at=at, error=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")))
        return made[-1]

    race = rounds({"base": Fake, "greedy": greedy}, turn_seconds=0.001)
    race.run()
    assert len(race.results["base"].seconds) == 3
    row = race.results["greedy"]
    assert row.out_of_memory
    assert row.problem == "out of memory"
    assert len(made) == 2
    assert all(each.closed for each in made[:-1] if each.done)
    lines = report.table(list(race.results.values()), RATES, on_cpu=True)
    assert "out of memory" in lines[2]


def test_one_that_has_no_room_beside_the_others_is_measured_alone(clock):
    base, makers = Fake(), []

    def greedy():
        makers.append(None)
        if not base.closed:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Fake(0.002)

    race = rounds({"base": lambda: base, "greedy": greedy})
    race.run()
    assert race.results["greedy"].alone
    assert len(race.results["greedy"].seconds) == 3
    assert report.between(race.results["base"], race.results["greedy"]) is not None
    assert "measured alone" in report.table(list(race.results.values()), RATES, on_cpu=True)[2]


@pytest.mark.parametrize("soak_seconds", [0, 0.01])
def test_one_that_had_room_until_the_others_came_is_measured_alone(clock, soak_seconds):
    """It is the first, and runs out of memory when it is soaked or timed."""
    there = []

    class Greedy(Fake):
        def step(self):
            if [each for each in there if not each.closed] != [self]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().step()

    def made(kind):
        there.append(kind())
        return there[-1]

    race = rounds({"greedy": lambda: made(Greedy), "lean": lambda: made(Fake)}, soak_seconds=soak_seconds)
    race.run()
    assert race.results["greedy"].alone
    assert not race.results["greedy"].problem
    assert [len(row.seconds) for row in race.results.values()] == [3, 3]


def test_a_retry_that_comes_to_nothing_costs_no_numbers(clock):
    """Two rounds beside another, out of memory in the third, and then the budget ends while it is built again."""
    made = []

    def greedy():
        made.append(None)
        if len(made) > 1:
            raise timing.Ended("the budget was over", errors.DONE)
        return Fake(fails_at=timing.WARM_UP + 1 + 2, error=torch.OutOfMemoryError("CUDA out of memory"))

    race = rounds({"base": Fake, "greedy": greedy}, turn_seconds=0.001)
    with pytest.raises(timing.Ended):
        race.run()
    assert [len(row.seconds) for row in race.results.values()] == [3, 2]


def test_what_was_ready_has_a_number_when_the_budget_ends_in_building(clock):
    written = []

    def endless():
        raise timing.Ended("the budget was over", errors.DONE)

    race = rounds({"base": Fake, "quick": lambda: Fake(0.0005), "endless": endless})
    race.write = lambda: written.append([row.usual_seconds for row in race.results.values()])
    with pytest.raises(timing.Ended):
        race.run()
    assert written[-1] == [pytest.approx(0.001, rel=0.02), pytest.approx(0.0005, rel=0.02), None]
    assert report.between(race.results["base"], race.results["quick"]) is None, "their turns were not of one round"
    lines = report.table(list(race.results.values()), RATES, on_cpu=True)
    assert all("1.0 ms" not in line and line.endswith("one turn before any round") for line in lines[1:3])
    assert "not measured" in lines[3]


class CompilationError(Exception):
    """As Triton's: of no class that torch's errors have."""


@pytest.mark.parametrize("kind", [CompilationError, AssertionError, TypeError, ImportError])
@pytest.mark.parametrize("at", [0, pytest.param(5, marks=pytest.mark.long)])
def test_whatever_goes_wrong_with_one_is_told_in_its_row(clock, capsys, kind, at):
    fails = Fake(fails_at=at, error=kind("what is wrong"))
    race = rounds({"base": Fake, "odd": lambda: fails}, turn_seconds=0.001)
    race.run()
    assert len(race.results["base"].seconds) == 3
    assert race.results["odd"].problem == f"{kind.__name__}: what is wrong"
    assert fails.closed
    assert "in step" in capsys.readouterr().err, "where it went wrong"


@pytest.mark.long
def test_a_variant_that_cannot_be_is_told_beside_the_others(tmp_path, capsys):
    code, found = bench(tmp_path, "variants={base: [], odd: [training.attention=cudnn]}", "rounds=1")
    assert code == errors.FAILED
    assert "training.attention=cudnn" in found["rows"][1]["problem"]
    assert found["rows"][0]["seconds"]


def test_no_round_begins_for_which_there_is_no_time(clock):
    """Rounds of 80 ms in a budget of 1 s, of which a third is kept for one that had no room."""
    race = rounds({"a": Fake, "b": Fake}, rounds=100_000, turn_seconds=0.04, budget_seconds=1.0)
    began = CLOCK.now
    race.run()
    assert 0.8 < CLOCK.now - began <= 1.0
    assert len(race.results["a"].seconds) == len(race.results["b"].seconds) > 8

    def greedy():
        if not base.closed:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Fake()

    base = Fake()
    race = rounds(
        {"a": lambda: base, "b": Fake, "greedy": greedy}, rounds=100_000, turn_seconds=0.04, budget_seconds=1.0
    )  # fmt: skip
    race.run()
    assert race.results["greedy"].alone
    assert all(len(row.seconds) > 3 for row in race.results.values())


def test_a_budget_that_ends_while_something_is_built(tmp_path, monkeypatch):
    def stubborn(config, **more):
        for _ in range(10):
            with contextlib.suppress(Exception):
                time.sleep(5)

    monkeypatch.setattr(variants, "build", stubborn)
    start = time.perf_counter()
    code, found = bench(tmp_path, "budget_seconds=.5")
    assert code == errors.DONE
    assert time.perf_counter() - start < 4.5
    assert not found["complete"]
    assert "budget of 0.5 s" in found["ended"]
    assert [row["name"] for row in found["rows"]] == ["base"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGTERM, errors.TERMINATED),
        pytest.param(signal.SIGINT, errors.INTERRUPTED, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_it_with_what_was_measured(tmp_path, monkeypatch, sent, code):
    record = Rounds._record

    def and_signal(self, one):
        record(self, one)
        os.kill(os.getpid(), sent)

    monkeypatch.setattr(Rounds, "_record", and_signal)
    found_code, found = bench(tmp_path, "rounds=100")
    assert found_code == code
    assert len(found["rows"][0]["seconds"]) == 1
    assert not found["complete"]
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_what_is_built_for_another_device_draws_on_the_cpu():
    """Only the networks' weights are drawn where they will be."""
    meta = torch.device("meta")
    config = load("quickstart", TINY).config
    parts = variants.build(config, meta, init_device=meta)
    assert {p.device for p in parts.net.parameters()} == {meta}
    draws = bench_inputs.random_batch(parts, 2, bench_inputs.image_shape(config)).draws
    assert {value.device for value in draws.values()} == {CPU}


@pytest.mark.long
def test_arithmetic_is_counted_alike_whatever_device_is_at_hand(monkeypatch):
    """And nothing that a GPU has of its own is put into networks without memory, nor the process's settings touched."""
    config = load("quickstart", [*TINY, "training.matmul_precision=medium"]).config
    parts, outlined = variants.build(config), []
    on_cpu = COUNT(config, parts)
    assert on_cpu > 1e6
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(variants, "outline", lambda config: outlined.append(outline(config)) or outlined[-1])
    assert COUNT(config, parts) == on_cpu
    assert outlined[0].device == CPU
    assert torch.get_float32_matmul_precision() == "medium"


def test_each_turn_begins_with_what_a_contestant_sets_for_the_process(clock):
    now = []

    class Setting(Fake):
        def begin(self):
            now[:] = [self]

        def step(self):
            assert now == [self]
            super().step()

    race = rounds({"a": Setting, "b": Setting}, soak_seconds=0.01)
    race.run()
    assert not any(row.problem for row in race.results.values())


@pytest.mark.long  # of the quick tests, run/test_first_pass.py has the comparison
def test_compiled_code_is_compared_before_it_is_timed(tmp_path, monkeypatch):
    def wrong(parts, batch):
        assert parts.loss(parts.net, batch).loss_B.shape == (2,), "of what is timed"
        raise UserError("compiled wrongly")

    monkeypatch.setattr(kernels.blocks, "compile_blocks", lambda net, names, device, cache_dir: None)
    monkeypatch.setattr(variants, "check_compiled_code", wrong)
    request = options.read(["quickstart", *TINY, "training.compile=blocks"])
    contestant = variants.Update(request.variants[0].config, request.options, tmp_path)
    with pytest.raises(UserError, match="compiled wrongly"):
        contestant.step()


def test_a_gpu_has_no_rate_of_float32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    rates = bench_cli.denominators(torch.device("cuda"))
    assert set(rates.products) == {torch.bfloat16}
    row = Result("float32", 4, 1e6, seconds=[1.0], warm_up_seconds=[1.0])
    assert report.document(row, row, rates)["share_of_measured_rate"] is None


def test_intervals():
    steady = report.ratio([2.0] * 9, [1.0] * 9)
    assert (steady.low, steady.median, steady.high) == (2.0, 2.0, 2.0)
    noisy = report.ratio([2.0, 4.0, 2.0, 1.0, 2.0], [1.0] * 5)
    assert noisy.low < noisy.median == 2.0 < noisy.high
    # Paired: rounds that were slow for both say nothing about either.
    assert report.ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]).high == 2.0
    assert report.ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0], paired=False).high > 2.0
    assert report.ratio([], [1.0]) is None
    assert str(report.ratio([2.0], [1.0])) == "2.000x (of one round)"


def test_compilation_is_what_the_first_updates_took_more():
    assert Result("x", warm_up_seconds=[9.0, 1.0, 1.0], seconds=[1.0, 1.0, 1.0]).compile_seconds == pytest.approx(8.0)
    assert Result("x", warm_up_seconds=[1.0, 1.0, 1.0], seconds=[2.0]).compile_seconds == 0.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("variants={base: [], again: [seed=0]}", "the same"),
        ("variants={}", "variants"),
        ("variants={base: [nothing.such=1]}", "nothing.such"),
        ("inputs=films", "latents"),
        ("out=/nowhere/at/all.json", "no folder"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, capsys, given, said):
    out = [] if given.startswith("out=") else [f"out={tmp_path / 'bench.json'}"]
    assert main.run(["bench", "quickstart", *TINY, *out, given]) == errors.REFUSED
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_the_loader_is_not_measured_beside_a_cache(tmp_path, capsys):
    words = ["inputs=loader", "cache.path=x", f"out={tmp_path / 'bench.json'}"]
    assert main.run(["bench", "quickstart", *TINY, *words]) == errors.FAILED
    assert "remove cache.path" in capsys.readouterr().out


def test_peaks_on_a_cpu():
    if not timing.forget_peak(CPU):
        pytest.skip("this system does not forget a process's peak of memory")
    before = timing.held_bytes(CPU)
    held = torch.ones(40_000_000)
    del held
    assert 100e6 < timing.peak_bytes(CPU) - before < 400e6
