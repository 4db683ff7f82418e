#!/usr/bin/env python3
"""Runs diffusers' train_dreambooth_lora_qwen_image.py itself, on the batches and random numbers of our run, and records
what it did for tests/parity/test_qwen_image_script.py. Run once, in the environment of the tests:

    git clone https://github.com/huggingface/diffusers /tmp/diffusers && git -C /tmp/diffusers checkout 58eb52c0
    python tools/record_qwen_image_script.py /tmp/diffusers/examples/dreambooth

As in `record_krea2_script.py`. SHA-256 of what was recorded with torch 2.13.0 and diffusers 0.42.1 on x86, one thread:

    qwen_image_script.json  c40c5f6175735bfc3b599a2996ee2ee1f4291915036f95494ea6236f7b688412
"""

from __future__ import annotations

import record_krea2_script as krea2  # puts our folders on the path of modules

import qwen_image_script  # isort: skip

if __name__ == "__main__":
    krea2.own = qwen_image_script
    krea2.main()
