"""The tokenizer of the checkpoint, built from the vocabulary; needs the tokenizers and transformers
libraries.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from samples.training.vocabulary import CHAT_TEMPLATE, SPECIAL, Extent, token_ids


def build_tokenizer(extent: Extent = "content") -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer that lowercases, splits off punctuation and ignores white space;
    see `words`.
    """
    core = Tokenizer(models.WordLevel(token_ids(extent), unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]
    )
    # Join words by one space, and punctuation to the word before it.
    core.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=[
            s for s in SPECIAL if s not in ("<unk>", "<|endoftext|>", "<|im_end|>")
        ],
        model_max_length=32768,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
