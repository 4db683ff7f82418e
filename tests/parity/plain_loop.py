"""A plain training loop from the published formulas with diffusers' and transformers' own parts, and nothing of ours.

It takes batches with the random numbers that were drawn for them (noise, timesteps, the posterior's noise) and gives
losses, gradients and weights. Letters: B samples, T tokens, D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMScheduler, EDMEulerScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

Conditioning = Callable[[Any], dict[str, Any]]
"""What the UNet is given for a batch beside noisy latents and timesteps."""
Losses = Callable[[Any, Mapping[str, Any]], Tensor]
"""The loss of each sample of a batch under its conditioning."""
EDM = EDMEulerScheduler(sigma_data=0.5)
Measure = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], float]
SCALED_LINEAR = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


@dataclass
class Outcome:
    """What a loop did."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each update, before clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    ema: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Models:
    """The networks of a pipeline's folder, each opened by its own library."""

    folder: Path
    prediction_type: str = "epsilon"
    snr_gamma: float | None = None
    bf16: bool = False
    """Run the UNet, and nothing else, under autocast to bfloat16."""
    controlnet: Any = None
    """A ControlNetModel beside the UNet; it is given what the UNet is, and `controlnet_cond`."""

    def __post_init__(self) -> None:
        vae = AutoencoderKL.from_pretrained(self.folder / "vae", low_cpu_mem_usage=False).requires_grad_(False)
        self.vae = vae.to(memory_format=torch.channels_last)
        self.unet = UNet2DConditionModel.from_pretrained(self.folder / "unet", low_cpu_mem_usage=False).train()
        self.scheduler = DDPMScheduler(**SCALED_LINEAR, prediction_type=self.prediction_type)
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        self.alphas_cumprod = (1 - betas).cumprod(0)
        kinds = {"": CLIPTextModel, "_2": CLIPTextModelWithProjection}
        present = [end for end in kinds if (self.folder / f"text_encoder{end}").is_dir()]
        self.texts = [kinds[end].from_pretrained(self.folder / f"text_encoder{end}") for end in present]
        self.tokenizers = [CLIPTokenizer.from_pretrained(self.folder / f"tokenizer{end}") for end in present]

    @property
    def predicts_v(self) -> bool:
        """Whether the UNet's answer means the velocity."""
        return self.prediction_type == "v_prediction"

    def latents(self, batch: Any) -> Tensor:
        """scale * (mean + std * noise), after the statistics of the channels where there are some."""
        config = self.vae.config
        with torch.no_grad():
            pixels = (batch.pixels_BCHW.float() / 127.5 - 1).to(memory_format=torch.channels_last)
            posterior = self.vae.encode(pixels).latent_dist
            z = posterior.mean + posterior.std * batch.draws["posterior"]
        if config.latents_mean is not None:
            mean, std = (torch.tensor(config[f"latents_{name}"]).view(1, -1, 1, 1) for name in ("mean", "std"))
            return ((z - mean) * config.scaling_factor / std).contiguous()
        return (z * config.scaling_factor).contiguous()

    def ids(self, texts: Sequence[str]) -> list[Tensor]:
        """Token ids of the texts by each tokenizer."""
        wanted: dict[str, Any] = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        return [t(list(texts), max_length=t.model_max_length, **wanted).input_ids for t in self.tokenizers]

    def sd(self, batch: Any) -> dict[str, Any]:
        """The last hidden state."""
        return {"encoder_hidden_states": self.texts[0](self.ids(batch.texts)[0])[0]}

    def sdxl(self, batch: Any) -> dict[str, Any]:
        """Both penultimate hidden states, the pooled text and six sizes; an empty caption is zeros."""
        made = [net(ids, output_hidden_states=True) for net, ids in zip(self.texts, self.ids(batch.texts), strict=True)]
        text_BTD = torch.cat([one.hidden_states[-2] for one in made], dim=-1)
        said_B = torch.tensor([float(text != "") for text in batch.texts])
        time_ids = torch.from_numpy(batch.sizes).float()  # original height and width, top and left, target h and w
        added = {"text_embeds": made[1].text_embeds * said_B[:, None], "time_ids": time_ids}
        return {"encoder_hidden_states": text_BTD * said_B[:, None, None], "added_cond_kwargs": added}

    def sdxl_long(self, batch: Any) -> dict[str, Any]:
        """Windows of as many tokens as fit between start and end; windows that a text does not have are masked."""
        hidden, pooled, used = [], [], []
        for net, tokenizer in zip(self.texts, self.tokenizers, strict=True):
            room = tokenizer.model_max_length - 2
            bodies = [tokenizer(text, add_special_tokens=False).input_ids for text in batch.texts]
            counts = [max(1, math.ceil(len(body) / room)) for body in bodies]
            windows = []
            for body in bodies:
                for start in range(0, max(counts) * room, room):
                    part = [tokenizer.bos_token_id, *body[start : start + room], tokenizer.eos_token_id]
                    windows.append(part + [tokenizer.pad_token_id] * (room + 2 - len(part)))
            made = net(torch.tensor(windows), output_hidden_states=True)
            hidden.append(made.hidden_states[-2].reshape(len(bodies), max(counts) * (room + 2), -1))
            pooled = made.text_embeds.reshape(len(bodies), max(counts), -1)[:, 0] if "text_embeds" in made else pooled
            used = [[k < count for k in range(max(counts)) for _ in range(room + 2)] for count in counts]
        said_B = torch.tensor([float(text != "") for text in batch.texts])
        added = {"text_embeds": pooled * said_B[:, None], "time_ids": torch.from_numpy(batch.sizes).float()}
        text = torch.cat(hidden, dim=-1) * said_B[:, None, None]
        mask = torch.tensor(used)
        return {"encoder_hidden_states": text, "encoder_attention_mask": mask, "added_cond_kwargs": added}

    def by_formula(self, batch: Any, conditioning: Mapping[str, Any]) -> Tensor:
        """x_t = a x0 + s eps, v = a eps - s x0, w = min(SNR, gamma) / (SNR + 1) or / SNR; a, s and w from float64."""
        x0, eps, t_B = self.latents(batch), batch.draws["noise"], batch.draws["c_noise"].long()
        acp_B, (a, s) = self.alphas_cumprod[t_B], self._coefficients(t_B)
        seen = eps + batch.draws.get("perturbation", 0.0)  # Ning et al. 2023: of the input, not of the target
        y = self.predicted(a * x0 + s * seen, t_B, conditioning)
        target = -s * x0 + a * eps if self.predicts_v else eps
        losses_B = (y - target).square().mean(dim=(1, 2, 3))
        return losses_B * self._weight(acp_B / (1 - acp_B)).float()

    def by_scheduler(self, batch: Any, conditioning: Mapping[str, Any]) -> Tensor:
        """The same by DDPMScheduler's add_noise and get_velocity, compute_snr and mse_loss, as diffusers' trainers."""
        x0, eps, t_B = self.latents(batch), batch.draws["noise"], batch.draws["c_noise"].long()
        seen = eps + batch.draws.get("perturbation", 0.0)
        x = self.scheduler.add_noise(x0, seen, t_B)
        target = self.scheduler.get_velocity(x0, eps, t_B) if self.predicts_v else eps
        if not self.bf16:
            y = self.predicted(x, t_B, conditioning)
        else:  # what enters the network, and the gradient at its end
            a, s = self._coefficients(t_B)
            y = self.predicted(_rounded_alike(x, a * x0 + s * seen, 0.0), t_B, conditioning)
            target = _rounded_alike(target, -s * x0 + a * eps if self.predicts_v else eps, y.detach())
        losses_B = nn.functional.mse_loss(y, target, reduction="none").mean(dim=(1, 2, 3))
        return losses_B * self._weight(compute_snr(self.scheduler, t_B))

    def _coefficients(self, t_B: Tensor) -> tuple[Tensor, Tensor]:
        """a and s, each [B, 1, 1, 1], rounded once from float64."""
        acp_B = self.alphas_cumprod[t_B]
        a, s = (c.sqrt().float().view(-1, 1, 1, 1) for c in (acp_B, 1 - acp_B))
        return a, s

    def by_edm(self, batch: Any, conditioning: Mapping[str, Any]) -> Tensor:
        """Karras et al. 2022, eq. 8, by the preconditioning of diffusers' EDMEulerScheduler in float64."""
        x0, eps, s_B = self.latents(batch).double(), batch.draws["noise"].double(), batch.draws["s"].double()
        s, data = s_B.view(-1, 1, 1, 1), EDM.config.sigma_data
        x = x0 + s * eps
        y = self.unet(EDM.precondition_inputs(x, s).float(), EDM.precondition_noise(s_B).float(), **conditioning).sample
        error = EDM.precondition_outputs(x, y.double(), s) - x0
        return ((s**2 + data**2) / (s * data) ** 2 * error.square()).mean(dim=(1, 2, 3)).float()

    def predicted(self, x: Tensor, t_B: Tensor, conditioning: Mapping[str, Any]) -> Tensor:
        """The UNet's answer in float32."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            if self.controlnet is None:
                return self.unet(x, t_B, **conditioning).sample.float()
            down, middle = self.controlnet(x, t_B, **conditioning, return_dict=False)
            own = {name: value for name, value in conditioning.items() if name != "controlnet_cond"}
            own |= {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
            return self.unet(x, t_B, **own).sample.float()

    def _weight(self, snr_B: Tensor) -> Tensor:
        if self.snr_gamma is None:
            return torch.ones_like(snr_B)
        return snr_B.clamp(max=self.snr_gamma) / (snr_B + 1 if self.predicts_v else snr_B)


def _rounded_alike(found: Tensor, exact: Tensor, start: Tensor | float) -> Tensor:
    """`found`, float32 numbers of diffusers that are as near to the exact ones as its float32 tables are. But for those
    whose distance from `start` lies so near an edge between two numbers of bf16 that these last bits choose one: there
    they are the exact ones, as else a rounding of 1e-7 would become one of 4e-3."""
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    return torch.where((found - start).bfloat16() == (exact - start).bfloat16(), found, exact)


def train(
    updates: Sequence[Sequence[Any]],
    losses: Losses,
    conditioning: Conditioning,
    trained: Mapping[str, nn.Module],
    rates: Mapping[str, float],
    *,
    fused: bool,
) -> Outcome:
    """Updates of torch's AdamW with clipping at 1, diffusers' cosine after two updates of warm-up, and its EMA.

    `trained`: networks by the prefix of their weights; `rates`: the learning rate of each. `fused`: AdamW's one kernel,
    which rounds in another order than the plain one.
    """
    outcome = Outcome()
    every = ((f"{part}.{name}", p) for part, network in trained.items() for name, p in network.named_parameters())
    named = {name: p for name, p in every if p.requires_grad}
    groups = [
        {
            "params": [p for p in trained[part].parameters() if p.requires_grad and (p.ndim > 1) == decays],
            "lr": rates[part],
            "weight_decay": 0.01 if decays else 0.0,
        }
        for part in trained
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, fused=fused)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=len(updates))
    ema = EMAModel(named.values(), decay=0.9)
    for micro_batches in updates:
        count, total = sum(len(batch.texts) for batch in micro_batches), 0.0
        for batch in micro_batches:
            loss = losses(batch, conditioning(batch)).sum() / count
            loss.backward()
            total += loss.item()
        outcome.losses.append(total)
        outcome.gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ema.step(named.values())
    outcome.weights = {name: p.detach().clone() for name, p in named.items()}
    outcome.ema = dict(zip(named, ema.shadow_params, strict=True))
    return outcome


def largest(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of a tensor over the largest number of its tensor, of the worst tensor."""
    assert ours.keys() == theirs.keys()
    different = [(ours[name], theirs[name]) for name in ours if not torch.equal(ours[name], theirs[name])]
    return max([float((a - b).abs().max() / b.abs().max()) for a, b in different], default=0.0)


def overall(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The norm of all differences over the norm of all numbers.

    Without the biases of CLIP's keys: they add the same to all scores of a query, so that their gradients are rounding
    errors, and Adam makes whole steps of them.
    """
    assert ours.keys() == theirs.keys()
    theirs = {name: value for name, value in theirs.items() if not name.endswith("k_proj.bias")}
    squares = [
        (float((ours[n] - t).double().square().sum()), float(t.double().square().sum())) for n, t in theirs.items()
    ]
    return float((sum(difference for difference, _ in squares) / sum(norm for _, norm in squares)) ** 0.5)


def differences(ours: Any, theirs: Outcome, measure: Measure) -> dict[str, float]:
    """Of a recorded run's losses, gradients, weights and averages, relative, the worst of all updates."""
    losses = [abs(a - b) / b for a, b in zip(ours.losses, theirs.losses, strict=True)]
    gradients = [measure(a, b) for a, b in zip(ours.gradients, theirs.gradients, strict=True)]
    found = {"loss": max(losses), "gradient": max(gradients)}
    # A layer behind the hidden state that is read learns nothing: it need not be averaged.
    assert ours.gradients[-1].keys() <= ours.ema.keys()
    averaged = {name: theirs.ema[name] for name in ours.ema}
    found |= {"weights": measure(ours.weights, theirs.weights), "ema": measure(ours.ema, averaged)}
    print(found)
    return found
