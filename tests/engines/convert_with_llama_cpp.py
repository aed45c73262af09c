"""Runs llama.cpp's converter, with a name for the tokenizer, which it knows by hashes of texts.

python convert_with_llama_cpp.py LLAMA_CPP FOLDER --outfile FILE
"""

import runpy
import sys
from pathlib import Path

source = Path(sys.argv.pop(1))
sys.path[:0] = [str(source / "gguf-py"), str(source)]

from conversion import base  # noqa: E402

base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"
sys.argv[0] = str(source / "convert_hf_to_gguf.py")
runpy.run_path(sys.argv[0], run_name="__main__")
