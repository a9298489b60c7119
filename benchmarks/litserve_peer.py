"""LitServe with the plain backbone and a linear head: the peer of `benchmarks.serving`, which starts it.

    python -m benchmarks.litserve_peer BACKBONE PORT PASSES

Its images are decoded and preprocessed as ours are. PASSES counts passes of the backbone per batch, as so many models.
"""

import sys
from typing import Any

import litserve
import torch
from torch import Tensor, nn

from vit_memory import load_backbone
from vit_memory.data.decoding import decode
from vit_memory.data.transforms import EvalTransform

CLASSES, BATCH, WAIT_S = 10, 16, 0.002


class PlainBackbone(litserve.LitAPI):
    """One answer per image: the backbone's own pass, and a head."""

    def __init__(self, source: str, passes: int) -> None:
        super().__init__(max_batch_size=BATCH, batch_timeout=WAIT_S)
        self.source, self.passes = source, passes

    def setup(self, device: str) -> None:
        """In the worker process."""
        self.backbone = load_backbone(self.source)
        assert self.backbone.preprocessing is not None
        self.transform = EvalTransform(self.backbone.preprocessing)
        self.heads = [nn.Linear(self.backbone.width, CLASSES) for _ in range(self.passes)]

    def decode_request(self, request, **kwargs):  # annotations would tell LitServe what to expect
        """The image of a form."""
        pixels = self.transform(decode(request["image"].file.read(), "image"))
        return self.transform.normalised(pixels[None])[0]

    def batch(self, inputs: list[Tensor]) -> Tensor:
        """One batch."""
        return torch.stack(inputs)

    @torch.no_grad()
    def predict(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Probabilities (B, passes, C)."""
        answers = []
        for head in self.heads:
            output = self.backbone.family.library_forward(self.backbone.model, x)
            answers.append(head(output["tokens"][:, 0]).softmax(-1))
        return torch.stack(answers, 1)

    def unbatch(self, output: Tensor) -> list[Tensor]:
        """One answer per request."""
        return list(output)

    def encode_response(self, output: Tensor, **kwargs: Any) -> dict[str, Any]:
        """The best class of every head."""
        confidence, label = output.max(-1)
        return {"labels": label.tolist(), "confidences": confidence.tolist()}


if __name__ == "__main__":
    api = PlainBackbone(sys.argv[1], int(sys.argv[3]))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=False)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="warning")
