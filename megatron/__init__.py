"""Megatron-DeepSpeed with built-in restart instrumentation. Importing this package imports nothing heavy.

megatron-core installs `megatron.core` and no `megatron` of its own. What other directories of the path have under this
name is looked at after ours, so that both can be imported wherever each is installed.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
