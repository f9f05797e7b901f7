"""`TensorSource`: batches from tensors in memory, a loader that costs next to nothing.

To measure the training loop without loading, and to try it without files.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from train.raw import EpochOrder


class TensorSource:
    """Batches of one split held in memory; the interface of `ShardLoader`.

    Args:
        images: `(N, 3, S, S)` uint8, given as they are, without crop or flip.
        labels: `(N,)` int64, below `len(wnids)`.
        split: `train` (shuffled by seed and epoch, remainder dropped) or `val` (all, in order).
        wnids: Class names in label order.
        batch_size: Images per step on this rank.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        split: str,
        *,
        wnids: tuple[str, ...],
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._images, self._labels = images, labels
        self.wnids = self.class_names = wnids
        self.num_classes = len(wnids)
        self.num_samples = len(labels)
        self.num_damaged = 0
        self._order = EpochOrder(len(labels), batch_size, split, seed, rank, world_size)
        self.steps_per_epoch = len(self._order)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the batches of one epoch, from `start_step` on."""
        self._order.epoch, self._order.start_step = epoch, start_step
        for places in self._order:
            positions = [position for _, position in places]
            yield self._images[positions], self._labels[positions]

    def close(self) -> None:
        """Do nothing: nothing is open."""
