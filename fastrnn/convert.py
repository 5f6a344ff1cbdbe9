def convert(model): raise NotImplementedError
def revert(model): raise NotImplementedError
