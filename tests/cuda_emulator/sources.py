"""Every kernel source, with what names its instantiations for a dtype."""

from polyloom.adapters.kernels import cuda as lora

SOURCES = ((lora.SOURCE, lora.kernel_names),)
