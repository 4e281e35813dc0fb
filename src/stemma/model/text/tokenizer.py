"""Text <-> token ids, as the checkpoint's own tokenizer says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend

from stemma.errors import ConfigError, InvalidRequest, ModelError
from stemma.foreign_code import ForeignCode
from stemma.model.files.directory import has_file, is_gguf, read_json
from stemma.model.files.generation import ends_messages_only
from stemma.model.files.llama_config import read_llama_config
from stemma.model.text.template_bounds import BoundedEnvironment, rendering, use_bounds
from stemma.model.text.text_cuts import TextCuts
from stemma.prefix.image_ids import FIRST_IMAGE_ID
from stemma.types import TokenArray, as_tokens

_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""transformers' own tag, which plain Jinja doesn't know."""
_TEMPLATE_GLOBALS = {"messages", "raise_exception", "strftime_now"}
_MAX_REASON_CHARS = 300
_MOST_ESCAPED = 6
_TURN = ({"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"})
_ADVICE = "take tokenizer.json and tokenizer_config.json from where the checkpoint comes from"
_WHILE_ENCODING = ForeignCode("the tokenizer can't encode this text", f"; {_ADVICE}")
_WHILE_DECODING = ForeignCode("the tokenizer can't decode these ids", f"; {_ADVICE}")
_PROCESSOR_TEMPLATE = "chat_template.json"
_MAX_TEMPLATE_BYTES = 1 << 20
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of one byte in vocabularies that aren't byte-level."""
_ENCODING = ("_encode_plus", "_convert_encoding", "set_truncation_and_padding")
"""Methods of transformers' own class that lie between `encode` and the library tokenizers."""


def _gguf_tokenizer(path: Path) -> Any:
    from stemma.model.files.gguf_header import read_header
    from stemma.model.formats.gguf.tokenizer import read_tokenizer

    return read_tokenizer(read_header(path))


use_bounds()


class TokenBytes(dict[int, bytes]):
    """The bytes of a byte-level vocabulary's tokens by id, looked up once each; of unknown ids none.

    A text's UTF-8 is that of its tokens, one after the other: so `decoders.ByteLevel` of the library decodes.
    """

    def __init__(self, raw: Any) -> None:
        """`raw`: the tokenizer of the library tokenizers."""
        super().__init__()
        self._raw = raw
        # The library's own characters for the 256 bytes: printable ones stand for themselves.
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in shown]
        self._byte_of = {chr(byte): byte for byte in shown}
        self._byte_of.update({chr(256 + number): byte for number, byte in enumerate(others)})

    def __missing__(self, token_id: int) -> bytes:
        token: str = self._raw.id_to_token(token_id) or ""
        try:
            found = bytes([self._byte_of[char] for char in token])
        except KeyError:  # an added token
            found = token.encode()
        self[token_id] = found
        return found


def _without_offsets(hf: Any) -> Any:
    """Return the tokenizer of the library tokenizers where `hf.encode` takes its ids as they are, else None.

    By itself it can leave out where each token came from, which nobody wants here: a quarter of the time.
    """
    if not isinstance(hf, TokenizersBackend) or hf.split_special_tokens:
        return None
    kind = type(hf)
    is_overridden = kind.encode is not PreTrainedTokenizerBase.encode or any(
        getattr(kind, name) is not getattr(TokenizersBackend, name) for name in _ENCODING
    )
    raw = hf.backend_tokenizer
    # Another library of the same interface may stand behind it; and `hf.encode` lifts limits at each call.
    is_plain = type(raw) is tokenizers.Tokenizer and raw.truncation is None and raw.padding is None
    return raw if is_plain and not is_overridden and not raw.encode_special_tokens else None


def _processor_template(path: Path) -> str | None:
    """Return the template that a model's processor for images brings in a file of its own; None: none."""
    if is_gguf(path) or not has_file(path, _PROCESSOR_TEMPLATE):
        return None
    found = read_json(path / _PROCESSOR_TEMPLATE).get("chat_template")
    return found if isinstance(found, str) else None


def _given_template(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_TEMPLATE_BYTES + 1)
        template = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"chat_template {path} can't be read as a file of text: {reason}") from error
    if len(content) > _MAX_TEMPLATE_BYTES:
        raise ConfigError(f"chat_template {path} has more than {_MAX_TEMPLATE_BYTES} bytes")
    try:
        _parsed(template)
    except (TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}," if line else f"{path}"
        raise ConfigError(f"chat_template {where} is no Jinja template: {error}") from error
    return template


def _parsed(template: str) -> tuple[BoundedEnvironment, Any]:
    """Return a template's syntax tree, with the environment that made it. Raises TemplateError."""
    environment = BoundedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    return environment, environment.parse(_GENERATION_TAG.sub("", template))


def _checked(token_ids: Sequence[int]) -> TokenArray:
    try:
        return as_tokens(token_ids)
    except OverflowError as error:
        raise ModelError(f"the tokenizer has ids of more than 31 bits; {_ADVICE}") from error


class Tokenizer:
    """A thin wrapper over the Hugging Face tokenizer of a checkpoint. Thread-safe to read."""

    def __init__(
        self, path: Path, *, trust_remote_code: bool = False, chat_template: Path | None = None
    ) -> None:
        """Read it. `chat_template`: a file whose text takes the place of the checkpoint's template.

        Raises ModelError if there is no usable tokenizer, ConfigError for a template that can't be read.
        """
        with ForeignCode(f"no usable tokenizer in {path}", f"; {_ADVICE}"):
            self._hf: Any = (
                _gguf_tokenizer(path)
                if is_gguf(path)
                else AutoTokenizer.from_pretrained(
                    str(path),
                    config=read_llama_config(path),
                    local_files_only=True,
                    trust_remote_code=trust_remote_code,
                )
            )
            # Some broken files are noticed only in use. This also lifts limits of length that a file may set.
            self._hf.decode(self._hf.encode("a"))
            if (template := _processor_template(path)) is not None:
                self._hf.chat_template = template
        if chat_template is not None:
            self._hf.chat_template = _given_template(chat_template)
        self._fast = _without_offsets(self._hf)
        self.cuts = None if self._fast is None else TextCuts.of(self._fast)
        """Where texts may be cut into pieces for `encode_pieces`; None: nowhere."""

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id; `generation_config.json` may name more."""
        token_id: int | None = self._hf.eos_token_id
        return token_id

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: the tokenizer's own, and the one that the template ends answers with."""
        found = (self.eos_token_id, self._end_of_turn())
        return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))

    def _end_of_turn(self) -> int | None:
        """Return the added token that the template writes right behind an answer; None: it writes none."""
        try:
            text = self.render_chat(_TURN, add_generation_prompt=False)
        except InvalidRequest:  # no template, or one that wants other messages
            return None
        _, answer, behind = text.rpartition(_TURN[-1]["content"])
        ids = self.encode(behind.lstrip(), add_special_tokens=False)[:1].tolist() if answer else []
        added = self._hf.added_tokens_decoder
        if not ids or ids[0] not in added or ends_messages_only(str(added[ids[0]]), self._hf.get_vocab()):
            return None
        return int(ids[0])

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out with `skip_special_tokens`."""
        added = self._hf.added_tokens_decoder.items()
        named = {i for i in self._hf.all_special_ids if i is not None}  # of a text that is no token: None
        return frozenset(named | {int(i) for i, token in added if token.special})

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """The bytes of each token; None where the text of tokens isn't that of their bytes joined."""
        raw = getattr(self._hf, "backend_tokenizer", None)
        cleaning = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        if raw is None or getattr(self._hf, cleaning, False):
            return None
        kinds = type(raw.model).__name__, type(raw.decoder).__name__
        return TokenBytes(raw) if kinds == ("BPE", "ByteLevel") else None

    @cached_property
    def spelling(self) -> Mapping[int, bytes]:
        """The bytes of each token, special ones included, as they stand in the middle of a text."""
        return self.token_bytes if self.token_bytes is not None else _Spelling(self)

    @cached_property
    def longest_texts(self) -> tuple[str, ...]:
        """Texts of tokens, those among them that are longest as they are, and in any encoding as JSON."""
        vocabulary: dict[str, int] = self._hf.get_vocab()
        longest = max(map(len, vocabulary), default=0)
        # JSON writes a control character with six. In a vocabulary of bytes a character is one of them.
        found = (i for token, i in vocabulary.items() if len(token) * _MOST_ESCAPED >= longest)
        return tuple(self.decode([token_id], skip_special_tokens=False) for token_id in found)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self._hf)

    @property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer underneath, for libraries that read it themselves."""
        return self._hf

    @property
    def chat_template(self) -> str | None:
        """The template's text; None without one. Of several: the one for tools, else the default."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return template if isinstance(template, str) else None

    @property
    def special_token_texts(self) -> frozenset[str]:
        """Tokens that `decode` leaves out with `skip_special_tokens`, as text."""
        added = self._hf.added_tokens_decoder.values()
        return frozenset(self._hf.all_special_tokens) | {str(token) for token in added if token.special}

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return bool(self._hf.chat_template)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that templates use, e.g. ``bos_token``."""
        return {
            name: str(token) for name, token in self._hf.special_tokens_map.items() if isinstance(token, str)
        }

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads and a caller may set; none of those it defines itself."""
        template = self._hf.chat_template
        if not isinstance(template, str):
            return frozenset()
        try:
            environment, tree = _parsed(template)
            found = find_undeclared_variables(tree)
        except (TemplateError, RecursionError):  # a template may nest without end
            return frozenset()
        own = set(inspect.signature(self._hf.apply_chat_template).parameters) | set(environment.globals)
        return frozenset(found - own - _TEMPLATE_GLOBALS)

    def token_text(self, token_id: int) -> str:
        """Return a token of the vocabulary as a text holds it; raise ModelError for an id of none."""
        token = self._hf.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            raise ModelError(f"the tokenizer has no token {token_id}, which config.json names; {_ADVICE}")
        return token

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenArray:
        """Return the ids of `text`, int32; raise ModelError if the tokenizer fails or its ids don't fit."""
        with _WHILE_ENCODING:
            if self._fast is not None:
                (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                found = encoding.ids
            else:
                found = self._hf.encode(text, add_special_tokens=add_special_tokens)
        return _checked(found)

    def encode_pieces(self, pieces: Sequence[str]) -> list[TokenArray]:
        """Return the ids of each piece that `cuts` makes of a text, int32, without special tokens.

        Raises ModelError as `encode` does.
        """
        assert self._fast is not None
        with _WHILE_ENCODING:
            encodings = self._fast.encode_batch_fast(list(pieces), add_special_tokens=False)
            found = [encoding.ids for encoding in encodings]
        return [_checked(ids) for ids in found]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; incomplete UTF-8 becomes U+FFFD; raise ModelError if it fails.

        An image's tokens read as one ``<image>``.
        """
        if len(token_ids) and max(token_ids) >= FIRST_IMAGE_ID:
            return self._decode_around_images(token_ids, skip_special_tokens=skip_special_tokens)
        with _WHILE_DECODING:
            text: str = self._hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def _decode_around_images(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(
            "<image>" if is_image else self.decode(list(run), skip_special_tokens=skip_special_tokens)
            for is_image, run in groupby(token_ids, lambda token_id: token_id >= FIRST_IMAGE_ID)
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as the template writes it; raise InvalidRequest if the template fails."""
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        try:
            with rendering():
                text = self._hf.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=list(tools) if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **dict(template_kwargs or {}),
                )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program from the checkpoint and may raise anything
            named = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise InvalidRequest(
                f"the chat template refuses these messages: {named[:_MAX_REASON_CHARS]}", param="messages"
            ) from error
        return str(text)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> TokenArray:
        """Return the ids of a conversation; arguments and errors as of `render_chat`."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


class _Spelling(dict[int, bytes]):
    """The bytes of tokens of any vocabulary, looked up once each; those of U+FFFD where nothing says more."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        # Many decoders leave out the space of a first token.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:].tolist()
        self._head = tokenizer.decode(self._before)

    def __missing__(self, token_id: int) -> bytes:
        text = self._tokenizer.decode([*self._before, token_id], skip_special_tokens=False)
        text = text.removeprefix(self._head)
        found = text.encode()
        if "\ufffd" in text and (byte := _BYTE.fullmatch(self._tokenizer.token_text(token_id))) is not None:
            found = bytes.fromhex(byte[1])
        self[token_id] = found
        return found
