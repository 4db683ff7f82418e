"""The contract of every diffusion objective: draws by key alone, finite losses and gradients, no waiting."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from daguerre.contracts import contract
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.objective import Draws, Example, Nets, Objective
from daguerre.objectives.settings import DiffusionSettings, ObjectiveSettings
from daguerre.types import IMAGE, Cond, LossTerms

KEYS = np.array([[5, 0, 0], [6, 1, 0], [2**62, 0, 3], [5, 1, 0]], dtype=np.int64)
SHAPE = (4, 3, 5)
WEIGHTINGS = ["none", "min_snr", "soft_min_snr", "debiased", "p2", "adaptive"]
LEVELS = [0.0, 1e-6, 0.25, 0.5, 0.75, 1 - 2**-53]


def loss_of(
    objective: Objective, net: Any, x0: Tensor, cond: Cond, draws: Draws | Mapping[str, Tensor], **others: Any
) -> LossTerms:
    """The loss of an objective on clean samples of one image. `others` are the further networks by role."""
    drawn = draws if isinstance(draws, Draws) else objective.drawn.of(draws)
    return objective.loss(Nets(net, others), Example({IMAGE: x0}, {IMAGE: cond}, drawn))


def identity(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
    return x


def clean(count: int = len(KEYS)) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(0))


def built(plugin: Any, given: Mapping[str, Any], **own: Any) -> Any:
    """The objective with the settings of the check, and further ones."""
    return plugin.build(plugin.Settings.model_validate({**given, **own}))


class ObjectiveContract(contract.SettingsContract):
    """The settings of every objective."""

    kind = "objectives"
    start = ObjectiveSettings

    def test_it_is_built_of_its_settings(self, plugin: Any, given: Any) -> None:
        assert isinstance(built(plugin, given), Objective)


class DiffusionContract(contract.Contract):
    """The promises of an objective around `objectives.algebra`."""

    kind = "objectives"

    @pytest.fixture(autouse=True)
    def _of_diffusion(self, plugin: Any) -> None:
        if not issubclass(plugin.Settings, DiffusionSettings):
            pytest.skip("not a diffusion objective")

    @pytest.fixture
    def objective(self, plugin: Any, given: Any) -> Any:
        """The objective with the settings of the check."""
        return built(plugin, given)

    def test_a_sample_has_the_same_draws_in_any_batch(self, objective: Diffusion) -> None:
        whole = objective.draws(7, KEYS, SHAPE).tensors
        for rows in ([3, 1], [2], [0, 1, 2], [1] * 17):
            part = objective.draws(7, KEYS[rows], SHAPE).tensors
            assert whole.keys() == part.keys()
            for name in whole:
                assert torch.equal(whole[name][rows], part[name]), name

    def test_draws_are_float32_on_the_cpu_one_row_a_sample(self, objective: Diffusion) -> None:
        for name, value in objective.draws(7, KEYS, SHAPE).tensors.items():
            assert value.dtype == torch.float32, name
            assert value.device.type == "cpu"
            assert value.shape == ((len(KEYS), *SHAPE) if name == "noise" else (len(KEYS),))

    @pytest.mark.parametrize("quantile", [None, 0.3])
    def test_levels_are_on_the_cpu_whatever_the_default_device_is(
        self, plugin: Any, given: Any, quantile: float | None
    ) -> None:
        found = []
        for where in ("cpu", "meta"):
            with torch.device(where):
                made = built(plugin, given)
                grid = made.grid(5)
                found.append({**vars(grid), **made.draws(7, KEYS, SHAPE, quantile=quantile).tensors})
        for name, value in found[0].items():
            same = torch.equal(value, found[1][name]) if isinstance(value, torch.Tensor) else value == found[1][name]
            assert same, name

    def test_each_part_of_the_key_and_the_seed_change_noise_and_level(self, objective: Diffusion) -> None:
        first = objective.draws(7, KEYS[:1], SHAPE).tensors
        others = [objective.draws(8, KEYS[:1], SHAPE).tensors]
        others += [objective.draws(7, KEYS[:1] + np.eye(3, dtype=np.int64)[i], SHAPE).tensors for i in range(3)]
        for other in others:
            assert not torch.equal(first["noise"], other["noise"])
            assert first["quantile"] != other["quantile"]

    def test_a_fixed_quantile_leaves_the_noise(self, objective: Diffusion) -> None:
        free, fixed = objective.draws(7, KEYS, SHAPE).tensors, objective.draws(7, KEYS, SHAPE, quantile=0.3).tensors
        assert torch.equal(free["noise"], fixed["noise"])
        for name in fixed.keys() - {"noise"}:
            assert (fixed[name] == fixed[name][0]).all(), name
        assert fixed["quantile"][0] == pytest.approx(0.3, abs=1e-7)

    def test_quantiles_stay_below_one(self, objective: Diffusion) -> None:
        assert objective.draws(7, KEYS, SHAPE, quantile=1 - 2**-53).tensors["quantile"].max() < 1

    def test_quantile_zero_is_the_clean_end(self, objective: Diffusion) -> None:
        a, s = objective.path(objective.times(torch.linspace(0, 0.9999, 500, dtype=torch.float64)))
        assert ((s / a).diff() >= 0).all()
        assert s[0] / a[0] < s[-1] / a[-1]

    def test_levels_are_drawn_evenly_over_the_law(self, objective: Diffusion) -> None:
        keys = np.array([[i, 0, 0] for i in range(2000)], dtype=np.int64)
        quantile = objective.draws(3, keys, (1, 1, 1)).tensors["quantile"].numpy()
        counts = np.histogram(quantile, bins=8, range=(0, 1))[0]
        assert ((counts - 250) ** 2 / 250).sum() < 24.3  # chi-square of 7 degrees, one in a thousand

    @pytest.mark.parametrize("quantile", LEVELS)
    @pytest.mark.parametrize("weighting", WEIGHTINGS)
    def test_loss_and_gradient_are_finite_at_every_level(
        self, plugin: Any, given: Any, weighting: str, quantile: float
    ) -> None:
        objective = built(plugin, given, weighting={"name": weighting})
        scale = torch.tensor(0.5, requires_grad=True)
        draws = objective.draws(7, KEYS, SHAPE, quantile=quantile).tensors
        terms = loss_of(
            objective, lambda x, c_noise, cond: scale * x + 1e-3 * c_noise[:, None, None, None], clean(), {}, draws
        )
        terms.loss_B.sum().backward()
        assert terms.loss_B.isfinite().all()
        assert scale.grad is not None
        assert scale.grad.isfinite()

    @pytest.mark.parametrize("quantile", [0.0, 1 - 2**-53])
    @pytest.mark.parametrize("mean", [-20.0, 20.0])
    def test_the_widest_laws_stay_finite(self, plugin: Any, given: Any, mean: float, quantile: float) -> None:
        law = "log_normal" if plugin.Settings(**given).schedule.name == "edm" else "logit_normal"
        objective = built(plugin, given, times={"name": law, "mean": mean, "std": 5.0})
        terms = loss_of(objective, identity, clean(), {}, objective.draws(7, KEYS, SHAPE, quantile=quantile).tensors)
        assert terms.loss_B.isfinite().all()

    def test_loss_is_a_mean_over_elements_in_float32(self, objective: Diffusion) -> None:
        draws = objective.draws(7, KEYS, SHAPE).tensors
        terms = loss_of(
            objective, lambda x, c_noise, cond: torch.zeros_like(x, dtype=torch.bfloat16), clean(), {}, draws
        )
        p, q = (draws[name].double().reshape(-1, 1, 1, 1) for name in ("p", "q"))
        expected = draws["weight"] * (p * clean() + q * draws["noise"]).square().mean((1, 2, 3))
        assert isinstance(terms, LossTerms)
        assert terms.loss_B.dtype == torch.float32
        torch.testing.assert_close(terms.loss_B.double(), expected, rtol=1e-5, atol=0)
        assert torch.equal(terms.quantile_B, draws["quantile"])

    def test_loss_of_bfloat16_latents_is_float32(self, objective: Diffusion) -> None:
        draws, latents = objective.draws(7, KEYS, SHAPE).tensors, clean().bfloat16()
        terms = loss_of(objective, identity, latents, {}, draws)
        assert terms.loss_B.dtype == torch.float32
        assert torch.equal(terms.loss_B, loss_of(objective, identity, latents.float(), {}, draws).loss_B)

    def test_loss_of_a_float64_network_is_float32(self, objective: Diffusion) -> None:
        terms = loss_of(
            objective, lambda x, c_noise, cond: x.double(), clean(), {}, objective.draws(7, KEYS, SHAPE).tensors
        )
        assert terms.loss_B.dtype == torch.float32

    def test_the_network_sees_the_scaled_noisy_sample_and_its_conditioning(self, objective: Diffusion) -> None:
        draws, cond = objective.draws(7, KEYS, SHAPE).tensors, {"text": torch.ones(len(KEYS), 2, 3)}
        seen: list[Any] = []

        def net(*shown: Any) -> Tensor:
            seen.append(shown)
            return shown[0]

        loss_of(objective, net, clean(), cond, draws)
        x, c_noise, passed = seen[0]
        a, s, c_in = (draws[name].reshape(-1, 1, 1, 1) for name in ("a", "s", "c_in"))
        torch.testing.assert_close(x, c_in * (a * clean() + s * draws["noise"]))
        assert torch.equal(c_noise, draws["c_noise"])
        assert passed is cond

    def test_offset_noise_is_in_path_and_target(self, plugin: Any, given: Any) -> None:
        objective = built(plugin, given, noise={"offset": 0.5})
        plain = built(plugin, given)
        with_offset, without = (o.draws(7, KEYS, SHAPE).tensors for o in (objective, plain))
        added = with_offset["noise"] - without["noise"]
        assert (added.flatten(2).std(-1) < 1e-6).all()
        assert added.flatten(1).std() > 0.1

    def test_input_perturbation_is_in_the_path_alone(self, plugin: Any, given: Any) -> None:
        """x_t = a x0 + s (eps + gamma xi), and the target has eps; as diffusers' --input_perturbation."""
        objective = built(plugin, given, noise={"input_perturbation": 0.5, "offset": 0.1})
        plain = built(plugin, given, noise={"offset": 0.1}).draws(7, KEYS, SHAPE).tensors
        draws, seen = objective.draws(7, KEYS, SHAPE).tensors, list[Tensor]()

        def net(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
            seen.append(x)
            return torch.zeros_like(x)

        assert all(torch.equal(draws[name], plain[name]) for name in plain)
        a, s, p, q, c_in = (draws[name].reshape(-1, 1, 1, 1) for name in ("a", "s", "p", "q", "c_in"))
        eps, xi = draws["noise"], draws["perturbation"] / 0.5
        assert abs(np.corrcoef(eps.flatten(), xi.flatten())[0, 1]) < 0.2
        terms = loss_of(objective, net, clean(), {}, draws)
        torch.testing.assert_close(seen[0], c_in * (a * clean() + s * (eps + 0.5 * xi)))
        expected = draws["weight"] * (p * clean() + q * eps).square().mean((1, 2, 3))
        torch.testing.assert_close(terms.loss_B, expected)

    def test_validation_is_free_of_bias_and_perturbation(self, plugin: Any, given: Any) -> None:
        values = {"timestep_bias": {"name": "later", "multiplier": 5}, "noise": {"input_perturbation": 0.1}}
        changed = built(plugin, given, **values).draws(7, KEYS, SHAPE, quantile=0.3).tensors
        plain = built(plugin, given).draws(7, KEYS, SHAPE, quantile=0.3).tensors
        assert changed.keys() == plain.keys()
        assert all(torch.equal(changed[name], plain[name]) for name in plain)

    def test_a_bias_moves_levels_and_leaves_noise_and_weight(self, plugin: Any, given: Any) -> None:
        """Each sample's quantile is that of its own key, moved; the loss is not weighted."""
        values = {"timestep_bias": {"name": "range", "multiplier": 3, "begin": 200, "end": 500}}
        objective, plain = built(plugin, given, **values), built(plugin, given)
        keys = np.array([[i, 0, 0] for i in range(2000)], dtype=np.int64)
        moved, draws = (o.draws(7, keys, (1, 1, 1)).tensors for o in (objective, plain))
        assert torch.equal(moved["noise"], draws["noise"])
        assert torch.equal(moved["weight"], draws["weight"])
        order = draws["quantile"].argsort()
        assert (moved["quantile"][order].diff() >= 0).all()
        inside = ((moved["quantile"] >= 0.2) & (moved["quantile"] < 0.5)).double().mean().item()
        assert inside == pytest.approx(0.9 / 1.6, abs=0.035)

    def test_loss_never_waits_for_the_device(self, objective: Diffusion) -> None:
        """Nothing may read a value back: on the meta device there are none."""
        draws = {name: value.to("meta") for name, value in objective.draws(7, KEYS, SHAPE).tensors.items()}
        assert loss_of(objective, identity, clean().to("meta"), {}, draws).loss_B.shape == (len(KEYS),)

    def test_it_has_no_state_and_refuses_one(self, objective: Diffusion) -> None:
        assert objective.learnt.state() == {}
        objective.learnt.load_state({})
        with pytest.raises(ValueError, match=r"of an objective \(level\).*objective.name"):
            objective.learnt.load_state({"level": torch.zeros(1)})

    @pytest.mark.parametrize("weighting", WEIGHTINGS)
    def test_levels_do_not_depend_on_the_place_in_the_batch_to_the_last_bit(
        self, plugin: Any, given: Any, weighting: str
    ) -> None:
        """float64, where vector and scalar code of one library differ."""
        values = {"weighting": {"name": weighting, "p2_gamma": 0.7} if weighting == "p2" else {"name": weighting}}
        objective = built(plugin, given, **values)
        quantile = torch.from_numpy(np.random.default_rng(0).random(997))

        def levels(part: torch.Tensor) -> torch.Tensor:
            t = objective.times(part)
            a, s = objective.path(t)
            told = objective.c_noise(t)
            return torch.stack(
                [t, told, a, s, *objective.target(a, s), objective.weight(a, s), objective.input_scale(a, s)]
            )

        assert torch.equal(levels(quantile), torch.cat([levels(part) for part in quantile.split(5)], dim=1))
