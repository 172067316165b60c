"""The alphabet of byte-level BPE: each of the 256 bytes is written as one printable character.

Source: GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py
"""

from __future__ import annotations


def _alphabet() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    chars = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in chars:
            chars[byte] = chr(256 + len(chars) - len(printable))
    return chars


CHAR_OF_BYTE = _alphabet()
BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}
