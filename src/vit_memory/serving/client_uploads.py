"""What a client sends: images from files, bytes or Pillow, and the files of tasks and branches. No HTTP here.

Neither Pillow nor torch is imported before something of theirs is met.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_memory.errors import FileError, ServingError

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageSource = str | Path | bytes | Image  # a file's path, a file's bytes, or an image of Pillow


def image_file(source: Any, number: int) -> tuple[str, bytes]:
    """The name and the bytes of an image."""
    if isinstance(source, str | Path):
        return Path(source).name, _read_file(Path(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return f"image {number}", bytes(source)
    if hasattr(source, "save") and hasattr(source, "mode"):  # Pillow's, which need not be imported for this
        return f"image {number}", encode_image(source)
    raise ServingError(
        f"image {number} is a {type(source).__name__}; expected a path, the bytes of a file, or an image of Pillow."
    )


def encode_image(image: "Image") -> bytes:
    """An image of Pillow as a file without loss; its pixels as they are, so without their EXIF orientation."""
    copy = image.copy()
    copy.info = {key: value for key, value in image.info.items() if key == "transparency"}
    file = io.BytesIO()
    if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        copy.save(file, "PNG", compress_level=1)
    else:  # PNG holds neither CMYK nor floating point
        copy.save(file, "TIFF")
    return file.getvalue()


def upload_of(source: Any) -> tuple[str, str, bytes]:
    """Where a task or branch is put: its kind in addresses, its name, and its file."""
    # Here, so that a client that only predicts does not wait for torch.
    from vit_memory.branch import Branch  # noqa: PLC0415
    from vit_memory.files.branchfile import branch_bytes, branch_from_bytes, is_branch_file  # noqa: PLC0415
    from vit_memory.files.taskfile import task_bytes, task_from_bytes  # noqa: PLC0415
    from vit_memory.task import Task  # noqa: PLC0415

    if isinstance(source, Task):
        return "tasks", source.name, task_bytes(source)
    if isinstance(source, Branch):
        return "branches", source.name, branch_bytes(source)
    path = Path(source)
    content = _read_file(path)  # parsed too, so that a damaged file is not sent
    if is_branch_file(path):
        return "branches", branch_from_bytes(bytearray(content), str(path)).name, content
    return "tasks", task_from_bytes(bytearray(content), str(path)).name, content


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read, {error.strerror}.") from error
