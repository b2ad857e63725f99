"""Which checkpoint module fills which rows of which fused linear: one table, read three ways.

The loader fuses weights by it, adapters map their tensors by it, DoRA reads base rows by it.
"""

from polyloom.adapters.base_layout import (
    BaseLayout,
    CheckpointModule,
    GroupShape,
    ModuleGroup,
    ModuleSlice,
)
from polyloom.platform.engine.model.config import DecoderConfig

LAYER_PREFIX = "model.layers"
HEAD_PATH = "lm_head"
EMBEDDING_PATH = "model.embed_tokens"
FINAL_NORM_PATH = "model.norm"


def base_layout(
    config: DecoderConfig, *, name: str, digest: str, other_names: tuple[str, ...] = ()
) -> BaseLayout:
    """The adapter-facing description of a base: its groups, and the modules PEFT knows."""
    return BaseLayout(
        name=name,
        digest=digest,
        architecture=config.architecture,
        model_type=config.model_type,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        tied_head=config.tied_head,
        layer_prefix=LAYER_PREFIX,
        groups=group_shapes(config),
        modules=checkpoint_modules(config),
        other_names=other_names,
    )


def group_shapes(config: DecoderConfig) -> tuple[GroupShape, ...]:
    """The fused linears, each slice under its unfused name even if the checkpoint fuses them."""
    q, kv, ff, hidden = (
        config.query_size,
        config.kv_size,
        config.intermediate_size,
        config.hidden_size,
    )
    slices: dict[ModuleGroup, tuple[tuple[str, int], ...]] = {
        ModuleGroup.QKV: (("q_proj", q), ("k_proj", kv), ("v_proj", kv)),
        ModuleGroup.OUT: (("o_proj", hidden),),
        ModuleGroup.GATE_UP: (("gate_proj", ff), ("up_proj", ff)),
        ModuleGroup.DOWN: (("down_proj", hidden),),
        ModuleGroup.HEAD: ((HEAD_PATH, config.vocab_size),),
    }
    in_features = {ModuleGroup.OUT: q, ModuleGroup.DOWN: ff}
    return tuple(
        GroupShape(
            group=group,
            layers=1 if group is ModuleGroup.HEAD else config.num_layers,
            in_features=in_features.get(group, hidden),
            slices=_offsets(named),
        )
        for group, named in slices.items()
    )


def _offsets(named: tuple[tuple[str, int], ...]) -> tuple[ModuleSlice, ...]:
    slices: list[ModuleSlice] = []
    offset = 0
    for name, size in named:
        slices.append(ModuleSlice(name, offset, size))
        offset += size
    return tuple(slices)


def checkpoint_modules(config: DecoderConfig) -> tuple[CheckpointModule, ...]:
    """Every linear under the name it has in the checkpoint, layers first, the head last."""
    shapes = {shape.group: shape for shape in group_shapes(config)}
    bias = {
        ModuleGroup.QKV: config.qkv_bias,
        ModuleGroup.OUT: config.out_bias,
        ModuleGroup.GATE_UP: config.mlp_bias,
        ModuleGroup.DOWN: config.mlp_bias,
        ModuleGroup.HEAD: False,
    }
    fused = (
        {ModuleGroup.QKV: "qkv_proj", ModuleGroup.GATE_UP: "gate_up_proj"}
        if config.fused_checkpoint
        else {}
    )
    modules: list[CheckpointModule] = []
    for group, shape in shapes.items():
        slices = shape.slices
        if group in fused:
            slices = (ModuleSlice(fused[group], 0, shape.out_features),)
        modules.extend(
            CheckpointModule(
                path=_parent(group) + part.name,
                group=group,
                offset=part.offset,
                out_features=part.out_features,
                in_features=shape.in_features,
                has_bias=bias[group],
            )
            for part in slices
        )
    return tuple(modules)


def tensor_path(module: CheckpointModule, layer: int) -> str:
    """Full name of a module in the checkpoint, without `.weight` or `.bias`."""
    if module.group is ModuleGroup.HEAD:
        return module.path
    return f"{LAYER_PREFIX}.{layer}.{module.path}"


def _parent(group: ModuleGroup) -> str:
    if group is ModuleGroup.HEAD:
        return ""
    return "self_attn." if group in (ModuleGroup.QKV, ModuleGroup.OUT) else "mlp."
