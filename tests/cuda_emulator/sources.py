"""Every kernel source, with what names its instantiations for a dtype."""

from polyloom.adapters.kernels import cuda_launch as lora
from polyloom.kvcache.kernels import cuda_attention_ops
from polyloom.platform.engine.kernels import cuda_sampling

SOURCES = (
    (lora.SOURCE, lora.kernel_names),
    (cuda_attention_ops.SOURCE, cuda_attention_ops.kernel_names),
    (cuda_sampling.SOURCE, cuda_sampling.kernel_names),
)
