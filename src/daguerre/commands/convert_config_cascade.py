"""What Stable Cascade's keys mean here: flat configs of Stage C and Stage B. Their families are not there yet."""

from __future__ import annotations

from daguerre.commands.convert_config_reading import REQUIRED, Reading

STAGES = {"3.6B": "cascade_c", "1B": "cascade_c", "3B": "cascade_b", "700M": "cascade_b"}
"""Sizes of the published models, and the family that each is of."""
UNASKED = {
    # Noise on a cosine schedule, its weight P2's; decay of every weight.
    "objective.name": "eps",
    "objective.schedule.name": "cosine",
    "objective.weighting.name": "p2",
    "optimizer.weight_decay_exclude": [],
    "lr_scheduler.name": "constant",
}
ALIASES = (
    *("experiment_id", "output_path", "lr", "image_size", "grad_accum_steps", "updates", "save_every"),
    *("backup_every", "warmup_updates", "ema_start_iters", "ema_iters", "ema_beta", "dataset_filters", "use_fsdp"),
    *("wandb_project", "wandb_entity", "wandb_api_key"),
)
"""Keys that mean what they mean on the command line."""
LATER = {
    "adaptive_loss_weight": "weights that adapt to the loss are not there yet; P2's are taken",
    "shift": "their code never reads it; objective.schedule.shift moves the noise levels",
    "rank": "LoRA is not there yet",
    "module_filters": "LoRA is not there yet",
    "train_tokens": "training of new tokens is not there yet",
}


def convert(reading: Reading) -> None:
    """Reads a whole config."""
    version = str(reading.get("model_version"))
    if version in STAGES:
        reading.carry_all("model_version", {"model.family": STAGES[version], "model.variant": version})
    reading.assume({"model.family": "cascade_c"})
    reading.notice("checkpoint_path", "a run keeps its checkpoints in its own folder, {output_dir}/{run_name}")
    reading.carry("batch_size", "training.global_batch_size", why="over all devices, as there")
    reading.carry("multi_aspect_ratio", "data.buckets.aspects")
    _data(reading)
    for key in ALIASES:
        reading.alias(key)
    reading.assume({"ema.enabled": any(path.startswith("ema.") for path in reading.values)})
    if reading.get("adaptive_loss_weight") is False:
        reading.notice("adaptive_loss_weight", "P2's weights, as there")
    for key, text in LATER.items():
        reading.refuse(key, text)
    for key in reading.keys("controlnet_*"):
        reading.refuse(key, "ControlNet is not there yet")
    for key in reading.keys("*_checkpoint_path"):
        reading.refuse(key, "the networks of Stable Cascade are not there yet")
    reading.assume(UNASKED)


def _data(reading: Reading) -> None:
    reading.assume({"data.source": "webdataset", "data.path": REQUIRED})
    for key in reading.keys("webdataset_path"):
        reading.carry(key, "data.path")
