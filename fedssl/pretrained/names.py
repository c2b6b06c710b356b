"""Names of tensors in checkpoints, and the rule that finds those of an encoder among them.

A checkpoint has further networks (heads, momentum encoders), and a prefix for the modules that contained the encoder
(``module.encoder_q.`` in MoCo, ``teacher.backbone.`` in DINO, ``backbone.`` in SimCLR and lightly). The rule removes
the prefix that leaves most names of the encoder, in its own layout or in one of `LAYOUTS`. Components that
``torch.compile``, FSDP and checkpointing of activations insert are removed first.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

# Names in a vision transformer: torchvision's, which are this project's, and timm's. # stands for a number.
_VIT_NAMES = (
    ("^class_token$", "^cls_token$"),
    ("^register_tokens$", "^reg_token$"),
    ("^conv_proj.", "^patch_embed.proj."),
    ("^encoder.pos_embedding$", "^pos_embed$"),
    ("^encoder.ln.", "^norm."),
    ("^encoder.layers.encoder_layer_#.", "^blocks.#."),
    (".ln_#.", ".norm#."),
    (".self_attention.in_proj_", ".attn.qkv."),
    (".self_attention.out_proj.", ".attn.proj."),
    (".mlp.0.", ".mlp.fc1."),
    (".mlp.3.", ".mlp.fc2."),
)


def _substitution(old: str, new: str) -> tuple[str, str]:
    return re.escape(old).replace(r"\^", "^").replace(r"\$", "$").replace(r"\#", r"(\d+)"), new.strip("^$").replace(
        "#", r"\1"
    )


TO_TIMM_VIT = tuple(_substitution(ours, timm) for ours, timm in _VIT_NAMES)
_FROM_TIMM_VIT = tuple(_substitution(timm, ours) for ours, timm in _VIT_NAMES)
# A ResNet as a sequence of its children: torchvision's, and lightly's ``ResNetGenerator``, which has neither activation
# nor pooling among them.
LIGHTLY_SEQUENCE = "names of a sequence of lightly's modules"
_SEQUENTIAL_RESNET = (
    (r"^0\.", "conv1."),
    (r"^1\.", "bn1."),
    *((rf"^{number + 3}\.", f"layer{number}.") for number in (1, 2, 3, 4)),
)
_LIGHTLY_RESNET = (
    (r"^0\.", "conv1."),
    (r"^1\.", "bn1."),
    *((rf"^{number + 1}\.", f"layer{number}.") for number in (1, 2, 3, 4)),
    (r"\.shortcut\.", ".downsample."),
)
# The official DINOv2 (https://github.com/facebookresearch/dinov2) to timm's: training stores blocks in chunks, in which
# a block keeps its number in the whole network.
_DINOV2 = (
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),
    (r"^register_tokens$", "reg_token"),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)

_WRAPPER = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Networks of a checkpoint that are not its encoder, if another one has the same names.
_SECONDARY = re.compile(r"encoder_k|target.*|student.*|.*momentum.*|.*ema")
# First components of names of classifiers, heads, decoders and queues, and of the token that hides patches.
_HEAD = re.compile(
    r".*head.*|fc|classifier|linear|projector|predictor|projection.*|prediction.*|prototypes|queue.*|.*decoder.*|"
    r"mask(ed)?_(token|embed\w*)"
)


@dataclass(frozen=True)
class Match:
    """Tensors of a checkpoint that belong to an encoder."""

    layout: str  # of `LAYOUTS`
    prefix: str
    sources: Mapping[str, str]  # names in the checkpoint by names in the encoder
    unexpected: Sequence[str]  # names in the checkpoint that neither the encoder nor a head has
    ignored: Mapping[str, int]  # number of tensors of each network or head that is not part of the encoder
    alternatives: Sequence[str]  # other prefixes with as many names of the encoder


def substitute(name: str, patterns: Sequence[tuple[str, str]]) -> str:
    """Apply pairs of a pattern and its replacement to a name, one after the other."""
    for pattern, new in patterns:
        name = re.sub(pattern, new, name)
    return name


def _from_efficientnet_pytorch(names: Collection[str], encoder_names: Collection[str]) -> dict[str, str]:
    """Rename EfficientNet-PyTorch's names to timm's, which number blocks within each stage.

    The first convolution of a block with expansion is timm's ``conv_pw``; without, the last one is.
    """
    outer = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
    expanded = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
    expanded |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
    plain = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    excitation = {"_se_reduce": "se.conv_reduce", "_se_expand": "se.conv_expand"}
    blocks = dict.fromkeys(found[0] for name in encoder_names if (found := re.match(r"blocks\.\d+\.\d+", name)))
    numbered = {str(number): block for number, block in enumerate(blocks)}
    renamed = {}
    for name in names:
        parts = name.split(".")
        if parts[0] == "_blocks" and len(parts) > 3 and parts[1] in numbered:
            has_expansion = f"_blocks.{parts[1]}._expand_conv.weight" in names
            inner = {**(expanded if has_expansion else plain), **excitation}
            renamed[name] = ".".join([numbered[parts[1]], inner.get(parts[2], parts[2]), *parts[3:]])
        else:
            renamed[name] = ".".join([outer.get(parts[0], parts[0]), *parts[1:]])
    return renamed


# Names of an architecture in other libraries, and how they become an encoder's: patterns of `substitute`, or None for
# `_from_efficientnet_pytorch`.
LAYOUTS: tuple[tuple[str, Sequence[tuple[str, str]] | None], ...] = (
    ("the encoder's names", ()),
    ("timm's names", _FROM_TIMM_VIT),
    ("DINOv2's names", _DINOV2),
    ("DINOv2's names", (*_DINOV2, *_FROM_TIMM_VIT)),
    ("torchvision's names", TO_TIMM_VIT),
    ("names of a sequence of torchvision's modules", _SEQUENTIAL_RESNET),
    (LIGHTLY_SEQUENCE, _LIGHTLY_RESNET),
    ("names of EfficientNet-PyTorch", None),  # github.com/lukemelas/EfficientNet-PyTorch
)


def known_statistics(names: Collection[str]) -> tuple[float, float] | None:
    """Return mean and standard deviation of all channels if the names identify them, as of EfficientNet-Lite.

    It alone has no squeeze and excitation. Others with the names of EfficientNet-PyTorch may have either statistics.
    """
    is_efficientnet = any(name.endswith("_blocks.0._depthwise_conv.weight") for name in names)
    is_lite = is_efficientnet and not any("._se_reduce." in name for name in names)
    return (0.5, 0.5) if is_lite else None


def match_names(names: Collection[str], encoder_names: Collection[str]) -> Match | None:
    """Find the names of an encoder among those of a checkpoint, both dotted; None if there are none."""
    stored = {_WRAPPER.sub("", name): name for name in names}
    if len(stored) < len(names):  # some would be equal without the components of wrappers
        stored = {name: name for name in names}
    candidates = sorted(_candidates(stored, encoder_names), key=lambda candidate: candidate[0])
    if not candidates:
        return None
    key, prefix, layout, renamed = candidates[0]
    wanted = set(encoder_names)
    sources = {new: stored[prefix + name] for name, new in renamed.items() if new in wanted}
    others = [name for name, new in renamed.items() if new not in wanted]
    heads = [name for name in others if _HEAD.fullmatch(_first(renamed[name]))]
    unexpected = [stored[prefix + name] for name in others if name not in heads]
    ignored = Counter(_first(renamed[name]) for name in heads)
    ignored.update(_first(name) for name in stored if not name.startswith(prefix))
    same = dict.fromkeys(other for count, other, *_ in candidates if count[0] == key[0] and other != prefix)
    return Match(layout, prefix, sources, unexpected, ignored, list(same))


def _candidates(
    names: Collection[str], encoder_names: Collection[str]
) -> Iterator[tuple[tuple[object, ...], str, str, dict[str, str]]]:
    """Yield every prefix and layout with common names, and first the key by which they are compared."""
    wanted = set(encoder_names)
    counts = Counter(name[: dot.end()] for name in names for dot in re.finditer(r"\.", name))
    # "" and every prefix, with its dot, that enough names have to contain an encoder.
    for prefix in ["", *(prefix for prefix, count in counts.items() if 2 * count >= len(wanted))]:
        inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        for order, (layout, patterns) in enumerate(LAYOUTS):
            if patterns is None:
                renamed = _from_efficientnet_pytorch(inner, encoder_names)
            else:
                renamed = {name: substitute(name, patterns) for name in inner}
            common = [new for new in renamed.values() if new in wanted]
            if common and len({*common}) == len(common):  # several names must not become one
                secondary = any(_SECONDARY.fullmatch(part) for part in prefix.split("."))
                yield (-len(common), secondary, len(prefix), prefix, order), prefix, layout, renamed


def _first(name: str) -> str:
    return name.split(".")[0]
