"""Write the corpus."""

from __future__ import annotations

from pathlib import Path

from making_corpus import text

PATH = Path(__file__).parents[2] / "llamatrio" / "testing" / "corpus" / "corpus.json"

if __name__ == "__main__":
    PATH.write_text(text(), "ascii", newline="\n")
