"""Development only: lets torchvision's wheel import beside a CPU-only build of torch.

That wheel's compiled part does not load there, and its Python part then fails on "operator torchvision::nms does not
exist", which also breaks timm. Declaring the two operators it asks for is enough for what timm and the transforms use.
`make setup` puts this file into .venv, where a .pth line imports it at start; users install matching wheels instead.
It costs nothing until torchvision is imported, and changes nothing where that import succeeds.
"""

import importlib
import importlib.abc
import sys

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Finder(importlib.abc.MetaPathFinder):
    """Tries the import of torchvision once; declares the operators if that is what fails, and steps aside."""

    tried = False
    library = None  # torch forgets the operators with the object that declared them

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision" or _Finder.tried:
            return
        _Finder.tried = True
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
            import torch

            _Finder.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                _Finder.library.define(operator + _SCHEMA)
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
        except ImportError:
            pass  # not installed: the import that asked says so itself
        return


sys.meta_path.insert(0, _Finder())
