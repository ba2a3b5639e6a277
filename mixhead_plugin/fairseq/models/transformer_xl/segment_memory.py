"""Keep the memory of Transformer-XL: hidden states of the previous window of text."""

import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.distributed import utils as distributed
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# It is no version. fairseq's moving average of a model (--store-ema) skips names with "version",
# and must skip a memory, because an average of memories has no meaning.
SKIPPED_BY_EMA = "version_1"

# The names of two tensors in a checkpoint: the states, [layers, M, B, C], with zeros before the
# positions that the memory held, and their `Place`.
STATES = f"{SKIPPED_BY_EMA}.states"
PLACE = f"{SKIPPED_BY_EMA}.place"


class Place(NamedTuple):
    """Where in the text the memory of a checkpoint was, and who held it.

    It is saved as a tensor of these four numbers, in this order.
    """

    window: int  # the number of the window that had ended
    held: int  # how many of the M positions are no zeros
    workers: int  # the number of workers of that training
    window_length: int  # the number of tokens in a window


class Remembered(NamedTuple):
    """What a memory holds after a window.

        window          5                6             7
        text      | ... | x x x x x | x x x x x | ...
                        |  before   |  states   |           after window 6

    `states` serve window 7, `before` serves window 6 if it is computed again.
    """

    states: list[Tensor]  # [M, B, C] for each layer: its inputs at the last M positions, detached
    window: int | None  # the number of the window that has ended; None if windows have no numbers
    before: list[Tensor]  # the states that this window saw


class SegmentMemory(nn.Module):
    """Keep two memories of one decoder: one for training and one for evaluation.

    A memory serves the next window, in the same mode and with the same number of rows. For every
    other window it is empty, such as the first of a text, set or epoch. A window that is computed
    again, as after an overflow under --amp, sees the same memory again. Windows without numbers
    continue from call to call. A change from training to evaluation empties the memory of
    evaluation.

    A checkpoint contains the memory of training, so that training can resume within an epoch. It
    belongs to the first worker and to numbered windows; otherwise training resumes without it.

    Args:
        length: M, the number of positions; 0 for no memory
        window_length: the number of tokens in a window; a checkpoint with another one is not used
    """

    def __init__(self, length: int, window_length: int):
        super().__init__()
        self.length = length
        self.window_length = window_length
        self._memories: dict[bool, Remembered] = {}  # by `self.training`

    def recall(self, window: int | None, like: Tensor) -> list[Tensor]:
        """Return the states [M, B, C] before a window for each layer; empty if there are none.

        Args:
            window: the window's number; None if windows have no numbers
            like: states of the window, [Nq, B, C]
        """
        last = self._memories.get(self.training)
        if last is None or last.states[0].size(1) != like.size(1):
            return []
        is_next = last.window is not None and window == last.window + 1
        if window is None or is_next:
            before = last.states
        elif window == last.window:
            before = last.before
        else:
            return []
        return [states.to(like) for states in before]

    def keep(self, window: int | None, before: list[Tensor], states: list[Tensor]) -> None:
        """Remember a window.

        Args:
            window: the window's number; None if windows have no numbers
            before: what `recall` returned for it
            states: the input of each layer, [Nq, B, C]
        """
        if self.length == 0:
            return
        kept = []
        for i, new in enumerate(states):
            rows = new.detach()
            if before:
                rows = torch.cat([before[i], rows])
            # Not a view, which would keep all states in memory.
            kept.append(rows[-self.length :].clone())
        self._memories[self.training] = Remembered(kept, window, before)

    def reset(self) -> None:
        """Empty both memories."""
        self._memories.clear()

    def train(self, mode: bool = True) -> "SegmentMemory":
        if self.training and not mode:
            self._memories.pop(False, None)
        return super().train(mode)

    def make_generation_fast_(self, **kwargs: Any) -> None:
        self.reset()  # fairseq calls this before generation: the memory of training is not needed

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        last = self._memories.get(True)
        if last is None or last.window is None:
            return
        states = torch.stack(last.states)  # [layers, M, B, C]
        held = states.size(1)
        # Always of the same size, because checkpoints are averaged tensor by tensor.
        destination[prefix + STATES] = F.pad(states, [0, 0, 0, 0, self.length - held, 0])
        place = Place(last.window, held, _workers(), self.window_length)
        destination[prefix + PLACE] = torch.tensor(place)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        states = state_dict.pop(prefix + STATES, None)
        place = state_dict.pop(prefix + PLACE, None)
        self.reset()
        if states is not None and place is not None and self.length > 0:
            self._load(states, Place(*place.tolist()))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _load(self, states: Tensor, place: Place) -> None:
        """Take the memory of a checkpoint, if it is of this training.

        Args:
            states: [layers, M, B, C], with zeros before the positions that it held
            place: where it was
        """
        if place.workers != _workers() or place.window_length != self.window_length:
            logger.info(
                "memory: empty, the checkpoint has another number of workers or length of windows"
            )
            return
        if place.workers > 1:
            logger.info(
                "memory: of the first worker, from the checkpoint; the other workers start empty"
            )
            if distributed.get_data_parallel_rank() > 0:
                return
        held = min(place.held, self.length)
        kept = [layer[-held:] for layer in states]
        self._memories[True] = Remembered(kept, place.window, before=[])


def _workers() -> int:
    return distributed.get_data_parallel_world_size() if torch.distributed.is_initialized() else 1
