"""A mode of torch that sees the calls of torch's functions."""

from typing import Any

from torch.overrides import TorchFunctionMode


class SeenFunctions(TorchFunctionMode):
    """Collects the names of the functions that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))
