"""From tokens to text, one token at a time.

A token is a run of bytes, not of characters: an emoji may be four tokens, and a stop string may
begin in one token and end in the next. So a stream shows text only once it can no longer change:

    tokens      "He"   "llo"  "\\xf0\\x9f" "\\x98\\x80"  " STO"   "P"            stop=["STOP"]
    shown       "He"   "llo"  ""           "😀"        " "      ends the text

Text is made after a step; the only thing it decides is that a stop string ended a request.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """The text of generated tokens, released as soon as it can no longer change.

    What it releases is the decoded text of the pushed ids, cut before the leftmost stop string in it.
    The ids include the token that completed the stop string; further ids are ignored.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = ()) -> None:
        """tokenizer: has `special_ids`, which have no text, `token_bytes(id)` and `without_first_space(text)`."""
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.stopped = False
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True
        self._held = ""  # characters that may turn out to begin a stop string

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is now certain, often one token's, sometimes none."""
        if token_id in self._tokenizer.special_ids:  # is not shown, but may be a stop string itself
            ends = self._tokenizer.token_bytes(token_id).decode() in self.stop
            text, self.stopped = self.finish() if ends else "", self.stopped or ends
            return text
        return self._release(self._utf8.decode(self._tokenizer.token_bytes(token_id)), hold=True)

    def finish(self) -> str:
        """After the last token: what was held back, half a character or a stop string that never came."""
        return self._release(self._utf8.decode(b"", final=True), hold=False)

    def _release(self, new: str, hold: bool) -> str:
        """Append `new` to what is held, and release all of it that no stop string may still begin with."""
        if self.stopped:
            return ""
        if self._at_start and new:
            new, self._at_start = self._tokenizer.without_first_space(new), False
        held = self._held + new
        matches = [place for stop in self.stop if (place := held.find(stop)) >= 0]
        if matches:
            self.stopped = True
            end, self._held = min(matches), ""
        else:
            end = len(held) - (self._begun_stop(held) if hold else 0)
            self._held = held[end:]
        return held[:end]

    def _begun_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self.stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop):
                return length
        return 0
