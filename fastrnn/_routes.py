"""Which code runs a checked call."""
from ._config import call_reference
def run(config, operands, lengths, resets, batch_sizes, batch):
    return call_reference(config, operands, lengths, resets, batch_sizes)
