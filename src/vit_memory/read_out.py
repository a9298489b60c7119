"""What a head reads of its class token's way through the blocks."""

from dataclasses import dataclass

from vit_memory.errors import TaskError


@dataclass(frozen=True, slots=True)
class ReadOut:
    """What a head reads: a class token's output of the last `blocks` blocks, and the mean of the final patch tokens.

    >>> ReadOut.parse("blocks:4+patches")
    ReadOut(blocks=4, patches=True)
    """

    blocks: int = 1  # each output passes the final norm; the last block's comes first
    patches: bool = False

    @classmethod
    def parse(cls, text: "str | ReadOut") -> "ReadOut":
        """From text: final, patches, blocks:N, or several joined by +. Raises TaskError for anything else."""
        if isinstance(text, ReadOut):
            return text
        parts = [part.strip().partition(":") for part in text.split("+")]  # (name, ":" or "", number or "")
        names = [name for name, _, _ in parts]
        numbers = {name: number for name, _, number in parts}
        blocks = numbers.pop("blocks", "1")
        fine = set(numbers) <= {"final", "patches"} and not any(numbers.values()) and len(set(names)) == len(names)
        if not fine or not blocks.isdecimal() or int(blocks) < 1:
            raise TaskError(
                f"read-out {text!r}: expected final, patches, blocks:N, or several joined by +, such as "
                f"blocks:4+patches."
            )
        return cls(int(blocks), "patches" in names)

    def __str__(self) -> str:
        parts = [f"blocks:{self.blocks}"] * (self.blocks > 1) + ["patches"] * self.patches
        return "+".join(parts) or "final"

    @property
    def parts(self) -> int:
        """How many vectors of the backbone's width a head reads."""
        return self.blocks + self.patches

    def check(self, where: str, depth: int) -> None:
        """Raise TaskError if there are not so many blocks."""
        if not 1 <= self.blocks <= depth:
            raise TaskError(f"{where}: a read-out of the last {self.blocks} blocks; the backbone has {depth}.")


FINAL = ReadOut()  # the last block's output alone
