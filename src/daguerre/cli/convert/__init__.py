"""Convert models, weights and configs between formats.

usage: daguerre convert VERB ...

  daguerre convert export runs/my-run format=single_file out=my-model.safetensors dtype=float16
  daguerre convert model sd_xl_base_1.0.safetensors out=sdxl-base
  daguerre convert ema runs/my-run width=0.15
  daguerre convert lora pytorch_lora_weights.safetensors format=kohya out=style.safetensors
  daguerre convert merge sd15.safetensors use='{style.safetensors: 0.8}' out=merged.safetensors
  daguerre convert config base14.yml

`daguerre convert VERB --help` says more about a verb.
"""
