"""What is closed when its `with` block ends. Knows nothing of what it closes."""

from types import TracebackType
from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing:
    """Own something outside of Python; closing twice is harmless."""

    def close(self) -> None:
        """Let go of it."""
        raise NotImplementedError

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
