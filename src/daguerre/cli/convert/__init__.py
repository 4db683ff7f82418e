"""`daguerre convert`: makes one form of a model from another. Each verb is a file here."""

SUMMARY = "convert models, weights and configs between formats"
HELP = """\
usage: daguerre convert VERB ...

  export   a run or a pipeline as one file for ComfyUI and A1111, as a diffusers folder, its UNet or its LoRA alone
  model    a single-file checkpoint or pickled weights as a diffusers folder
  ema      a pipeline with averaged weights of another width than the run was exported with
  lora     a LoRA in the names of another program: kohya's (ComfyUI, A1111), diffusers' or peft's
  merge    LoRAs put into the weights of a model, each with its strength
  extract  a LoRA of the difference between a fine-tuned model and its base
  resize   a LoRA of lower rank, and a LoRA of a LoHa or LoKr
  tokens   new tokens (textual inversion) for diffusers, A1111, ComfyUI and kohya's scripts
  config   a recipe from a config of another trainer: kohya's TOML, OneTrainer, MaxDiffusion, MindOne ...

  daguerre convert export runs/my-run format=single_file out=my-model.safetensors dtype=float16
  daguerre convert model sd_xl_base_1.0.safetensors out=sdxl-base
  daguerre convert ema runs/my-run width=0.15
  daguerre convert lora pytorch_lora_weights.safetensors format=kohya out=style.safetensors
  daguerre convert merge sd15.safetensors use='{style.safetensors: 0.8}' out=merged.safetensors
  daguerre convert config base14.yml

`daguerre convert VERB --help` says more about a verb.
"""
