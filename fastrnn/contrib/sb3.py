"""sb3-contrib's recurrent policies (RecurrentPPO) over fastrnn's LSTM: whole sequences run where episodes begin.

sb3-contrib runs its LSTMs step by step as soon as one episode starts in a batch, and each sequence of a training batch
does start one. With ``resets=`` the layer runs the batch in one call.
"""

from __future__ import annotations

import torch
from sb3_contrib.common.recurrent import policies
from torch import Tensor

from .. import convert as swap
from .._recurrent import Recurrent
from ..convert import Report

__all__ = [
    "CnnLstmPolicy",
    "MlpLstmPolicy",
    "MultiInputLstmPolicy",
    "RecurrentActorCriticCnnPolicy",
    "RecurrentActorCriticPolicy",
    "RecurrentMultiInputActorCriticPolicy",
    "convert",
]


class _WholeSequences:
    """What the policies do otherwise than sb3-contrib's; an LSTM that is not fastrnn's runs as there."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        swap(self)

    @staticmethod
    def _process_sequence(
        features: Tensor, lstm_states: tuple[Tensor, Tensor], episode_starts: Tensor, lstm: torch.nn.Module
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run one LSTM over B sequences of T steps.

        Args:
            features: [B*T, I], sequence after sequence.
            lstm_states: (h [L, B, H], c [L, B, H]) before the first step.
            episode_starts: [B*T], not zero where an episode starts: the state is zero before this step.
            lstm: the layer.

        Returns:
            output [B*T, H] and the states after the last step.
        """
        if not isinstance(lstm, Recurrent):
            return policies.RecurrentActorCriticPolicy._process_sequence(features, lstm_states, episode_starts, lstm)
        rows = lstm_states[0].shape[1]
        x = features.reshape(rows, -1, lstm.input_size).transpose(0, 1)
        resets = episode_starts.reshape(rows, -1).transpose(0, 1) != 0
        output, states = lstm(x, lstm_states, resets=resets)
        return output.transpose(0, 1).flatten(0, 1), states


class RecurrentActorCriticPolicy(_WholeSequences, policies.RecurrentActorCriticPolicy):
    """sb3-contrib's policy with fastrnn.LSTM; the same arguments and results."""


class RecurrentActorCriticCnnPolicy(_WholeSequences, policies.RecurrentActorCriticCnnPolicy):
    """sb3-contrib's policy for images with fastrnn.LSTM; the same arguments and results."""


class RecurrentMultiInputActorCriticPolicy(_WholeSequences, policies.RecurrentMultiInputActorCriticPolicy):
    """sb3-contrib's policy for dictionaries with fastrnn.LSTM; the same arguments and results."""


# sb3-contrib's short names.
MlpLstmPolicy = RecurrentActorCriticPolicy
CnnLstmPolicy = RecurrentActorCriticCnnPolicy
MultiInputLstmPolicy = RecurrentMultiInputActorCriticPolicy

_ADAPTERS = {
    policies.RecurrentActorCriticPolicy: RecurrentActorCriticPolicy,
    policies.RecurrentActorCriticCnnPolicy: RecurrentActorCriticCnnPolicy,
    policies.RecurrentMultiInputActorCriticPolicy: RecurrentMultiInputActorCriticPolicy,
}


def convert(policy: torch.nn.Module) -> Report:
    """:func:`fastrnn.convert` for sb3-contrib's recurrent policies: the policy changes its class too.

    Parameters and optimizer stay valid. A model that is loaded has a new policy of the class that it was made with:
    give RecurrentPPO a policy of this module from the start, or convert after ``load``.

    Args:
        policy: RecurrentPPO's ``policy``, or a module that holds such policies.

    Returns:
        The report of fastrnn.convert.

    Raises:
        TypeError: ``policy`` is no module.
    """
    for module in policy.modules() if isinstance(policy, torch.nn.Module) else ():
        module.__class__ = _ADAPTERS.get(type(module), type(module))
    return swap(policy)
