"""The tokenizer that a GGUF file carries, rebuilt with the `tokenizers` library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineError
from engine.tokens import HfTokenizer

if TYPE_CHECKING:
    from engine.weights.gguf import GgufFile

CONTROL = 3
# How text is cut before byte-pair merging, by `tokenizer.ggml.pre`: the patterns of the models' own tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}


def gguf_tokenizer(file: GgufFile) -> HfTokenizer | None:
    """The tokenizer, or None where the file has none. Raises EngineError for a kind that is not known."""
    if file.get("tokenizer.ggml.tokens") is None:
        return None
    kind = file.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise EngineError(
            f"{file.where}: its tokenizer is of kind '{kind}'; byte-pair ones ('gpt2') are read from GGUF; "
            "take the model's Hugging Face folder instead"
        )
    from transformers import PreTrainedTokenizerFast

    tokens = file.get("tokenizer.ggml.tokens")

    def named(key: str) -> str | None:
        token = file.get(f"tokenizer.ggml.{key}_token_id")
        return None if token is None else tokens[token]

    inner = PreTrainedTokenizerFast(
        tokenizer_object=_byte_pair(file, tokens),
        bos_token=named("bos"),
        eos_token=named("eos"),
        pad_token=named("padding"),
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
    ends = (file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
    return HfTokenizer(inner, [token for token in ends if token is not None])


def _byte_pair(file: GgufFile, tokens: list[str]):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    merges = [tuple(line.split(" ", 1)) for line in file.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=False))
    cut = file.get("tokenizer.ggml.pre", "default")
    if cut in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[cut]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif cut == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif cut in ("default", "gpt-2"):
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        raise EngineError(f"{file.where}: its tokenizer cuts text by '{cut}', which is not known here")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.get("tokenizer.ggml.token_type", [])
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if file.get("tokenizer.ggml.add_bos_token"):
        bos = file.get("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer
