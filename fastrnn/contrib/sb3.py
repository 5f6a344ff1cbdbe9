"""sb3-contrib's recurrent policies (RecurrentPPO) with fastrnn's LSTM, which runs sequences across episode starts.

sb3-contrib runs its LSTMs step by step if an episode starts anywhere in a batch, as it does in every sequence of a
training batch. With ``resets=`` the layer runs the batch in one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sb3_contrib.common.recurrent import policies
from torch import Tensor

from .. import convert as swap
from .._core.recurrent import Recurrent
from ..conversion import Report

__all__ = [
    "CnnLstmPolicy",
    "MlpLstmPolicy",
    "MultiInputLstmPolicy",
    "RecurrentActorCriticCnnPolicy",
    "RecurrentActorCriticPolicy",
    "RecurrentMultiInputActorCriticPolicy",
    "convert",
]


if TYPE_CHECKING:
    _Module = torch.nn.Module
else:
    _Module = object


class _WholeSequences(_Module):
    """The difference from sb3-contrib's policies; an LSTM that is not fastrnn's runs as in sb3-contrib."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        swap(self)

    @staticmethod
    def _process_sequence(
        features: Tensor, lstm_states: tuple[Tensor, Tensor], episode_starts: Tensor, lstm: torch.nn.Module
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run one LSTM over B sequences of T steps.

        Args:
            features: [B*T, I], one sequence after the other.
            lstm_states: (h [L, B, H], c [L, B, H]) before the first step.
            episode_starts: [B*T], nonzero where an episode starts: the state before this step is zero.
            lstm: the layer.

        Returns:
            Output [B*T, H] and the states after the last step.
        """
        if not isinstance(lstm, Recurrent):
            base: type[Any] = policies.RecurrentActorCriticPolicy
            result: tuple[Tensor, tuple[Tensor, Tensor]]
            result = base._process_sequence(features, lstm_states, episode_starts, lstm)
            return result
        rows = lstm_states[0].shape[1]
        x = features.reshape(rows, -1, lstm.input_size).transpose(0, 1)
        resets = episode_starts.reshape(rows, -1).transpose(0, 1) != 0
        output, states = lstm(x, lstm_states, resets=resets)
        return output.transpose(0, 1).flatten(0, 1), states


# sb3-contrib is not seen by mypy: its classes count as Any.
class RecurrentActorCriticPolicy(_WholeSequences, policies.RecurrentActorCriticPolicy):  # type: ignore[misc]
    """sb3-contrib's policy with fastrnn.LSTM; the same arguments and results."""


class RecurrentActorCriticCnnPolicy(_WholeSequences, policies.RecurrentActorCriticCnnPolicy):  # type: ignore[misc]
    """sb3-contrib's policy for images with fastrnn.LSTM; the same arguments and results."""


class RecurrentMultiInputActorCriticPolicy(
    _WholeSequences,
    policies.RecurrentMultiInputActorCriticPolicy,  # type: ignore[misc]
):
    """sb3-contrib's policy for dictionaries with fastrnn.LSTM; the same arguments and results."""


# sb3-contrib's short names.
MlpLstmPolicy = RecurrentActorCriticPolicy
CnnLstmPolicy = RecurrentActorCriticCnnPolicy
MultiInputLstmPolicy = RecurrentMultiInputActorCriticPolicy

_ADAPTERS: dict[type[torch.nn.Module], type[_WholeSequences]] = {
    policies.RecurrentActorCriticPolicy: RecurrentActorCriticPolicy,
    policies.RecurrentActorCriticCnnPolicy: RecurrentActorCriticCnnPolicy,
    policies.RecurrentMultiInputActorCriticPolicy: RecurrentMultiInputActorCriticPolicy,
}


def convert(policy: torch.nn.Module) -> Report:
    """:func:`fastrnn.convert` for sb3-contrib's recurrent policies, which changes the class of the policy too.

    Parameters and optimizer stay valid. Loading a model makes a new policy of the class with which it was created: give
    RecurrentPPO a policy of this module from the start, or convert after ``load``.

    Args:
        policy: RecurrentPPO's ``policy``, or a module that contains such policies.

    Returns:
        The report of fastrnn.convert.

    Raises:
        TypeError: ``policy`` is not a module.
    """
    for module in policy.modules() if isinstance(policy, torch.nn.Module) else ():
        module.__class__ = _ADAPTERS.get(type(module), type(module))
    return swap(policy)
