"""Importing the package must cost nothing: engines and accelerator libraries come later."""

import subprocess
import sys

HEAVY = ("torch", "xgrammar", "transformers", "tokenizers", "jax", "flax", "tvm_ffi")
PROGRAM = f"""
import sys
import grammar_host
from grammar_host import Guide, GrammarCompiler, TokenizerInfo
from grammar_host.backends import base, scripted
info = TokenizerInfo.from_vocabulary([b"a", b""], [1])
GrammarCompiler(info)
Guide.json_schema({{"type": "object"}})
print([name for name in {HEAVY} if name in sys.modules])
"""


def test_the_import_is_light():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
