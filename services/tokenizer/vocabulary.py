"""The vocabulary: text to ids and ids to text, from a checkpoint's tokenizer.json."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from rorqual.core.control_tokens import is_control_token
from rorqual.core.errors import CheckpointError, InvalidRequestError

from .abandon import check_wanted
from .checkpoint import TextCheckpoint
from .control_tokens import ControlTokens, Segment, cut_control
from .formats.marks import END_THINK, THINK, Marks
from .pieces import MAX_PIECE_CHARS, PieceEncoder
from .run_cache import RunCache
from .splits import find_cut
from .token_text import TokenText, build_token_text, byte_level_alphabet

_LEARNED_AT_ONCE = 64
_FEW_CHARS = 16 * 1024


def _keeps_text(source: dict[str, Any]) -> bool:
    """Whether the tokenizer reads a text as it is: no normalizer, or one that does nothing."""
    normalizer = source.get("normalizer")
    return normalizer is None or normalizer == {"type": "Sequence", "normalizers": []}


class Vocabulary:
    """Immutable once built, but for what it remembers; encoding gives the interpreter away often, in any thread."""

    def __init__(self, checkpoint: TextCheckpoint) -> None:
        path = checkpoint.folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): it may be cut short, or newer than the installed `tokenizers`; "
                "download it again or upgrade",
                field="model",
            ) from error
        decoder = type(self._tokenizer.decoder).__name__
        if decoder != "ByteLevel":
            raise CheckpointError(
                f"{path} has decoder {decoder}; served are byte-level vocabularies (ByteLevel), as all "
                "of the DeepSeek family are",
                field="model",
            )
        source: dict[str, Any] = json.loads(checkpoint.tokenizer_json)
        cut = find_cut(self._tokenizer, source.get("pre_tokenizer") or {})
        # The same model without added tokens: what a caller spells stays text.
        self._plain = Tokenizer(self._tokenizer.model)
        self._plain.pre_tokenizer = self._tokenizer.pre_tokenizer
        if not _keeps_text(source):
            self._plain.normalizer = self._tokenizer.normalizer
        self._model = self._tokenizer.model
        self._letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
        self._pieces: PieceEncoder | None = None
        if cut is not None and _keeps_text(source):
            self._pieces = PieceEncoder(
                cut,
                lambda pieces: self._checked([self._encode_piece(piece) for piece in pieces]),
                lambda texts: self._encode_with(self._plain, texts),
            )
        self._runs = RunCache(self._encode_plain)

        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocab.values()) + 1
        """One more than the highest id."""
        if checkpoint.vocab_size and self.size > checkpoint.vocab_size:
            raise CheckpointError(
                f"{path} has ids up to {self.size - 1} but {checkpoint.folder / 'config.json'} says vocab_size "
                f"{checkpoint.vocab_size}: the two are not of one checkpoint; download both again",
                field="model",
                metadata={"tokenizer_size": str(self.size), "vocab_size": str(checkpoint.vocab_size)},
            )
        added = self._tokenizer.get_added_tokens_decoder()
        self.control = ControlTokens({token.content: token_id for token_id, token in added.items()})
        """All added tokens, special or not: a caller's text must not become any of them."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.control_ids = frozenset(added)
        self._tokens = {token_id: token for token, token_id in vocab.items()}
        self.cuts_exactly = _keeps_text(source) and not any(
            token.lstrip or token.rstrip or token.single_word for token in added.values()
        )
        """Control tokens may be cut out of a text beforehand: none takes blanks beside it, or asks for them."""
        letters = frozenset(self._letters.values())
        self._texts_hold_no_control = self.cuts_exactly and not any(
            token_id in self.control_ids and letters.issuperset(token)
            for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items()
        )
        """Plain text is never encoded as a control token, so cutting those out beforehand is all there is to do."""
        self.longest_token_chars = max(map(len, vocab)) if self.cuts_exactly else None
        """No token stands for more characters; None where the tokenizer drops or rewrites some before it counts."""

        self.bos_token = checkpoint.bos_token
        self.bos_id = self._named_id(checkpoint, "bos_token", checkpoint.bos_token)
        eos_id = self._named_id(checkpoint, "eos_token", checkpoint.eos_token)
        self.add_bos = self.bos_id is not None and (
            checkpoint.add_bos_token
            if checkpoint.add_bos_token is not None
            else self._tokenizer.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]
        )
        for token_id in checkpoint.eos_token_ids:
            if token_id >= max(self.size, checkpoint.vocab_size):
                raise CheckpointError(
                    f"eos_token_id {token_id} in {checkpoint.folder}'s generation_config.json or config.json is beyond "
                    f"the vocabulary of {self.size}: the files are not of one checkpoint; download them again",
                    field="model",
                )
        ends = dict.fromkeys([*checkpoint.eos_token_ids, *([] if eos_id is None else [eos_id])])
        self.eos_ids = tuple(ends)
        """The ids that end a text unless the request ignores them."""
        if not self.eos_ids:
            raise CheckpointError(
                f"{checkpoint.folder} names no end-of-sequence token: give eos_token in tokenizer_config.json or "
                "eos_token_id in generation_config.json",
                field="model",
            )

        size = max(self.size, checkpoint.vocab_size)
        self.raw_text = build_token_text(self._tokens.items(), size)
        """Every token as it is."""
        self.plain_text = self.raw_text.replaced(dict.fromkeys(self.special_ids, ""))
        """Without special tokens."""
        self.marks = Marks(self.control.ids)
        self.think_ids = (self.control.ids.get(THINK), self.control.ids.get(END_THINK))
        hidden = {
            token_id: ""
            for token_id, token in added.items()
            if token_id in self.special_ids or is_control_token(token.content)
        }
        self._chat_tables = {
            (calls, show): self.raw_text.replaced(
                {
                    **({} if show else hidden),
                    **self.marks.think_sentinels,
                    **(self.marks.call_sentinels if calls else {}),
                }
            )
            for calls in (False, True)
            for show in (False, True)
        }

    def chat_table(self, *, calls: bool, show_marks: bool) -> TokenText:
        """The text of an answer's tokens: the think tags, and with `calls` the marks of calls, stand as sentinels.

        All other control tokens write nothing, or themselves with `show_marks`.
        """
        return self._chat_tables[calls, show_marks]

    def _named_id(self, checkpoint: TextCheckpoint, key: str, token: str) -> int | None:
        if not token:
            return None
        token_id: int | None = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise CheckpointError(
                f"{checkpoint.folder / 'tokenizer_config.json'} names {key} {token!r}, which "
                f"{checkpoint.folder / 'tokenizer.json'} does not have: the two are not of one checkpoint",
                field="model",
            )
        return token_id

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, in which control tokens are recognised; none is added."""
        if self._pieces is not None and self._texts_hold_no_control:
            return self.encode_segments(cut_control(text, self.control))
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a plain prompt: with the begin-of-sequence token where the checkpoint adds one and the text has none."""
        ids = self.encode(text)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """The ids of plain runs and control tokens. InvalidRequestError where plain text cannot be kept plain."""
        runs = iter(self._runs.encode([segment.text for segment in segments if not segment.is_control]))
        ids: list[int] = []
        for segment in segments:
            if segment.is_control:
                ids.append(self.control.ids[segment.text])
            else:
                ids += next(runs)
        return ids

    def learn_tokens(self) -> None:
        """Find out which tokens are what their own text is encoded as (nearly all: merges may lead elsewhere).

        Plain texts are then encoded by looking these up. Takes 7 to 15 us a token (V4's 128,000: 1.5 to 1.9 s
        of a busy core), so run it beside what else has to be done; before it ends, encoding takes longer.
        """
        if self._pieces is None:
            return
        tokens: dict[str, tuple[int]] = {}
        for token_id, text in enumerate(self.raw_text.texts):
            if token_id % _LEARNED_AT_ONCE == 0:
                time.sleep(0)  # as in PieceEncoder.encode
            if not text or len(text) > MAX_PIECE_CHARS or token_id in self.control_ids:
                continue
            if self._encode_piece(text) == [token_id]:
                tokens[text] = (token_id,)
        self._pieces.use_tokens(tokens)

    def _encode_piece(self, piece: str) -> list[int]:
        """The ids of a text that is not to be cut. (One by one like this takes a third of what the library takes for a
        batch, for which it wakes a thread on every core.)"""
        letters = piece.encode().decode("latin-1").translate(self._letters)
        return [token.id for token in self._model.tokenize(letters)]

    def _encode_plain(self, texts: list[str]) -> list[Sequence[int]]:
        found = [self._pieces.encode(text) if self._pieces is not None else None for text in texts]
        others = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        made = iter(self._encode_with(self._plain, others) if others else ())
        return [ids if ids is not None else next(made) for ids in found]

    def _encode_with(self, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        # Several at once wait for the library's own threads, which another batch may keep for seconds; one does not. Short
        # ones may be on the event loop, and one by one they take no longer.
        batches = [[text] for text in texts] if sum(map(len, texts)) <= _FEW_CHARS else [texts]
        ids: list[list[int]] = []
        for batch in batches:
            check_wanted()
            ids += [run.ids for run in tokenizer.encode_batch_fast(batch, add_special_tokens=False)]
        return self._checked(ids)

    def _checked(self, encoded: list[list[int]]) -> list[list[int]]:
        if any(not self.control_ids.isdisjoint(ids) for ids in encoded):
            raise InvalidRequestError(
                "a message spells a control token that this vocabulary cannot write as plain text",
                reason="INVALID_MESSAGES",
                field="messages",
            )
        return encoded

    def token_strings(self, token_ids: Iterable[int]) -> list[str]:
        """The tokens as the vocabulary spells them; empty for an id it does not have."""
        return [self._tokens.get(token_id, "") for token_id in token_ids]
