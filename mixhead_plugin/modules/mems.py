"""What a model remembers of the window of text before, and that it belongs to that window alone."""

import logging
from typing import Any, Dict, List, NamedTuple, Optional

import torch
import torch.nn.functional as F
from fairseq.distributed import utils as distributed
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# fairseq's moving average of a model (--store-ema) passes over what has "version" in its name, as it must over these.
STATES, PLACE = "version_1.states", "version_1.place"


class Memory(NamedTuple):
    states: List[Tensor]  # [M, B, C] for each layer: what went into it at the last M places, detached
    window: Optional[int]  # the number of the window that they end with, if the caller knows
    before: List[Tensor]  # those that this window was computed with, for when it is computed again


class Mems(nn.Module):
    """The memory of one decoder: one for training, one for evaluation, neither of which sees the other.

    A memory serves the window after the one it was made of, in the same mode and with as many rows; for every other
    window it is empty: the first of a text, of another set or epoch, after a reset of the data loader. One that is
    computed again, as after an overflow under --amp, has what it had. A caller that has no numbers for its windows goes
    on from call to call. The evaluation's memory ends with each change from training to evaluation.

    A checkpoint has the training's memory, so that training resumed within an epoch goes on as if uninterrupted.
    It is that of the first worker, the only one to save: the other workers, whose text is another, start with
    an empty one.

    Args:
        length: how many places are remembered; 0 for none
        window_length: of the windows that are numbered; only tells a checkpoint of other windows
    """

    def __init__(self, length: int, window_length: int):
        super().__init__()
        self.length = length
        self.window_length = window_length
        self._of_training: Optional[Memory] = None
        self._of_evaluation: Optional[Memory] = None

    def recall(self, window: Optional[int], like: Tensor) -> List[Optional[Tensor]]:
        """The states [M, B, C] before a window, by layer; an empty list if there are none.

        Args:
            window: its number, None if it has none
            like: states of the window, [Nq, B, C]
        """
        memory = self._of_training if self.training else self._of_evaluation
        if memory is None or memory.states[0].size(1) != like.size(1):
            return []
        if window is None or (memory.window is not None and window == memory.window + 1):
            return [states.to(like) for states in memory.states]
        return [states.to(like) for states in memory.before] if window == memory.window else []

    def keep(self, window: Optional[int], before: List[Tensor], states: List[Tensor]) -> None:
        """Remember a window.

        Args:
            window: its number, None if it has none
            before: what `recall` gave for it
            states: what went into each layer, [Nq, B, C]
        """
        if self.length == 0:
            return
        kept = []
        for i, new in enumerate(states):
            parts = [new.detach()[-self.length :]]
            old = min(self.length - parts[0].size(0), before[i].size(0) if before else 0)
            if old:
                parts.insert(0, before[i][-old:])
            kept.append(torch.cat(parts))  # a copy, so that nothing larger stays alive
        memory = Memory(kept, window, before)
        if self.training:
            self._of_training = memory
        else:
            self._of_evaluation = memory

    def reset(self) -> None:
        """Forget everything, of training and of evaluation."""
        self._of_training = self._of_evaluation = None

    def train(self, mode: bool = True) -> "Mems":
        if self.training and not mode:
            self._of_evaluation = None
        return super().train(mode)

    def make_generation_fast_(self, **kwargs: Any) -> None:
        self.reset()  # fairseq's word that nothing is trained any more: a checkpoint's memory need not stay

    def _save_to_state_dict(self, destination: Dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        memory = self._of_training
        if memory is None or memory.window is None:
            return
        states = torch.stack(memory.states)  # [layers, M, B, C]
        held = states.size(1)
        # of one size from the first update on: checkpoints are averaged tensor by tensor
        destination[prefix + STATES] = F.pad(states, [0, 0, 0, 0, self.length - held, 0])
        destination[prefix + PLACE] = torch.tensor([memory.window, held, _workers(), self.window_length])

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *args: Any) -> None:
        states, site = state_dict.pop(prefix + STATES, None), state_dict.pop(prefix + PLACE, None)
        self.reset()
        if states is not None and site is not None and self.length > 0:
            self._load(states, *site.tolist())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _load(self, states: Tensor, window: int, held: int, workers: int, window_length: int) -> None:
        if (workers, window_length) != (_workers(), self.window_length):
            logger.info("memory: empty, since the checkpoint's is of another number of workers or length of windows")
            return
        if workers > 1:
            logger.info("memory: of the first worker, from the checkpoint; that of the others starts empty")
            if distributed.get_data_parallel_rank() > 0:
                return
        held = min(held, self.length)
        self._of_training = Memory([layer[-held:] for layer in states], window, [])


def _workers() -> int:
    return distributed.get_data_parallel_world_size() if torch.distributed.is_initialized() else 1
