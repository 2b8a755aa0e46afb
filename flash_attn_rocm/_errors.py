"""The one public error class of the package, and one between its modules.

Our own functions raise it before anything is launched or written. The raw op
raises RuntimeError, the replaced scaled_dot_product_attention whatever the
stock function raises.

SPDX-License-Identifier: BSD-3-Clause
"""


class FlashAttnError(ValueError):
    """Bad input or a missing part; names the argument, what was expected, what came."""


class LaunchFailure(RuntimeError):
    """The op failed inside an autograd.Function.

    What else comes out of one is not about kernels: hooks of saved tensors run there
    too, and torch.utils.checkpoint ends a recomputation by an exception of its own.
    """
