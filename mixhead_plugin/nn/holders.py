"""Find what keeps a module beside the place that it has in a model.

    class Block(nn.Module):
        def __init__(self):
            self.attention = Attention()                its place, where `mix` puts another module
            self.all = [self.attention]                 a holder: it goes on with the former one
            self.attend = self.attention.forward        a holder, too
            self.call = lambda x: self.attention(x)     none: it takes what is in the place

The search begins at the attributes of every module of the model, but for the modules to find, and
goes on with what those refer to:

    followed                                        not followed
    lists, dicts, and objects of any class          texts, numbers, tensors
    methods, to the object that they belong to      classes, and modules of Python
    functions: closures, defaults, attributes       functions: global variables
    partial functions and hooks                     code, and the frames of a program that runs
"""

import gc
import sys
from collections.abc import Collection, Iterator
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import Tensor, nn

# What a module does not keep as its own, though it leads there: the globals of a file, the classes,
# and the local variables of a program that runs.
_NOT_KEPT = (type, ModuleType, FrameType, GeneratorType, CodeType, Tensor)


def holders(model: nn.Module, modules: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each attribute of a model that holds one of some modules, and the module.

    Args:
        model: the model that has the modules
        modules: those to find. What they hold themselves is not looked at

    Yields:
        the name of the attribute in the model, as "layers.0.all", and the module that it holds
    """
    # By their ids, because what a program keeps need not have a hash.
    wanted = {id(module): module for module in modules}
    of_model = {id(module) for module in model.modules()}
    # Each object is looked at once, because layers share a config, whose vocabulary may have many
    # thousands of entries.
    done = _variables_of_files()
    for place, value in _attributes(model, modules):
        for held in _inside(value, of_model, done):
            if id(held) in wanted:
                yield place, wanted[id(held)]


def _variables_of_files() -> set[int]:
    """Return the ids of the dicts with the variables of all files, and of a notebook.

    They are no attributes of the model, though an object in it may lead to them.
    """
    files = [file for file in list(sys.modules.values()) if isinstance(file, ModuleType)]
    return {id(vars(file)) for file in files}


def _attributes(model: nn.Module, modules: Collection[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes in a model that stay when some modules are replaced."""
    for path, module in model.named_modules():
        if module in modules:
            continue  # what it has is replaced with it
        for name, value in vars(module).items():
            if name != "_modules":  # the new modules are put there
                yield f"{path}.{name}" if path else name, value


def _inside(value: Any, of_model: Collection[int], done: set[int]) -> Iterator[Any]:
    """Yield what an attribute holds, however deep: in containers, objects, closures and methods.

    The garbage collector knows what any object refers to, so no kind of holder is left out.

    Args:
        value: the attribute
        of_model: ids of the modules of the model, whose attributes are looked at by themselves
        done: ids of what is left out; gets those of what is yielded
    """
    waiting = [value]
    while waiting:
        held = waiting.pop()
        # Texts and numbers, and what has nothing else inside, are unknown to the collector.
        if not gc.is_tracked(held) or id(held) in done or isinstance(held, _NOT_KEPT):
            continue
        done.add(id(held))
        yield held

        if isinstance(held, FunctionType):  # not its globals
            waiting += [held.__closure__, held.__defaults__, held.__kwdefaults__, vars(held)]
        elif id(held) not in of_model:
            waiting += gc.get_referents(held)
