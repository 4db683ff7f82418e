"""Adaptive loss weights: one over the running mean of the raw loss at each noise level, learnt while training.

Stable Cascade's weighting (Pernias et al. 2023, arXiv 2306.00637; its code's `AdaptiveLossWeight`): log-SNR is cut into
buckets, each keeps an exponential mean of the unweighted losses that fell into it, and a sample is weighted by one over
the mean of its bucket. The weights of closed form are in weights.py.

Shape letters: B samples, K buckets.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from daguerre import devices
from daguerre.errors import UserError
from daguerre.types import LossTerms

LOWEST, HIGHEST = -10.0, 10.0
"""log-SNR of the first and the last inner edge of the buckets."""
SMALLEST, LARGEST = 1e-7, 1e7
"""Bounds of a weight."""


class AdaptiveWeight:
    """The table of running means [K] float64, from 1, and the sums of the update in progress.

    The table after an update is a function of the global batch alone: a bucket that k of its samples hit goes from b
    to decay^k b + (1 - decay^k) m, with m the mean of their raw losses. That is k steps of the usual exponential mean,
    each by m, so neither the order of the samples nor the number of devices matters.
    """

    def __init__(self, buckets: int, decay: float) -> None:
        self.decay = decay
        # From 1, as Stable Cascade's code: a level that no sample has hit yet has weight 1.
        self.table_K = torch.ones(buckets, dtype=torch.float64, device="cpu")
        self._edges = torch.linspace(LOWEST, HIGHEST, buckets - 1, dtype=torch.float64, device="cpu")
        self._sums: Tensor | None = None

    def bucket(self, log_snr_B: Tensor) -> Tensor:
        """Index [B] int64 of each sample's bucket; levels beyond the range count to the first and the last."""
        self._move(log_snr_B.device)
        return torch.searchsorted(self._edges, log_snr_B.to(self._edges.dtype))

    def weight(self, log_snr_B: Tensor) -> Tensor:
        """Weight [B] float32 of the raw loss of samples at these levels."""
        bucket_B = self.bucket(log_snr_B)  # moves the table to its device
        return (1.0 / self.table_K[bucket_B]).clamp(SMALLEST, LARGEST).float()

    @torch.no_grad()
    def observe(self, terms: LossTerms, valid_B: Tensor) -> None:
        """Adds the raw losses of a micro-batch; those of empty slots, and those that are not finite, do not count."""
        assert terms.raw_loss_B is not None
        assert terms.log_snr_B is not None
        wide = devices.widest(terms.log_snr_B.device)
        raw_B = terms.raw_loss_B.detach().to(wide)
        # One NaN would stay in the running mean for good, as every later mean is made of it.
        counts_B = ((valid_B > 0) & torch.isfinite(raw_B)).to(wide)
        raw_B = torch.where(counts_B > 0, raw_B, 0.0)
        bucket_B = self.bucket(terms.log_snr_B)
        # A product instead of index_add, whose order of addition is not fixed on a GPU.
        one_hot_KB = (torch.arange(len(self.table_K), device=bucket_B.device)[:, None] == bucket_B).to(wide)
        sums_2K = torch.stack([one_hot_KB @ counts_B, one_hot_KB @ raw_B])
        self._sums = sums_2K if self._sums is None else self._sums + sums_2K

    @torch.no_grad()
    def absorb(self, total: Callable[[Tensor], Tensor], skip: Tensor) -> None:
        """Takes up what was observed since the last call, summed over all devices by `total`; not where `skip`."""
        if self._sums is None:
            return
        (counts_K, raw_K), self._sums = total(self._sums), None
        kept_K = self.decay**counts_K
        # A level that nobody hit keeps its mean: 0 / 0 would be NaN, also times 0.
        mean_K = raw_K / counts_K.clamp(min=1.0)
        # The host does not know `skip`.
        # In place: passes that were recorded read this very memory.
        self.table_K.copy_(torch.where(skip, self.table_K, kept_K * self.table_K + (1.0 - kept_K) * mean_K))

    def state(self) -> dict[str, Tensor]:
        return {"adaptive_loss": self.table_K}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up a table that `state` gave. UserError without a table, or for one of another size."""
        saved_K = tensors.get("adaptive_loss")
        if saved_K is None or saved_K.shape != self.table_K.shape:
            held = "no table" if saved_K is None else f"a table of {len(saved_K)} noise levels"
            raise UserError(
                f"objective.weighting is adaptive with {len(self.table_K)} noise levels, and the checkpoint holds "
                f"{held}: set objective.weighting to that of its run",
                code="changed",
                setting="objective.weighting.name",
            )
        self.table_K = saved_K.to(self.table_K)

    def _move(self, device: torch.device) -> None:
        # At the first use: the objective is made before the device of a run is chosen.
        if self.table_K.device != device:
            wide = devices.widest(device)
            self.table_K, self._edges = self.table_K.to(device, wide), self._edges.to(device, wide)
