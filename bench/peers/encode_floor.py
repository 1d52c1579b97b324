"""The bare tokenizer over texts rendered beforehand, on all cores: no mask, nothing stored. Arguments: FILE.jsonl MODEL_FOLDER."""

import json
import sys
from typing import Any

from answer import serve


def main() -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    file, model = sys.argv[1:]
    with open(file, encoding="utf-8") as lines:
        conversations = [json.loads(line)["messages"] for line in lines]
    texts = AutoTokenizer.from_pretrained(model).apply_chat_template(conversations, tokenize=False)
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")

    def work() -> dict[str, Any]:
        found = tokenizer.encode_batch(texts, add_special_tokens=False)
        return {"rows": len(found), "tokens": sum(len(one.ids) for one in found)}

    serve(work)


if __name__ == "__main__":
    main()
