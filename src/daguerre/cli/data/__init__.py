"""Pack, index, verify, measure and show a data set.

usage: daguerre data VERB DATA [key=value ...]

DATA is a path (a folder of images, tar shards, a parquet or CSV table; also s3://, gs://, https://), or a recipe, of
which the data section is read. Settings are changed as in training, so that filters, captions and buckets are the same:

  daguerre data stats my_images
  daguerre data stats quickstart
  daguerre data show "shards/part-{000..009}.tar" data.resolution=256 data.filters="pwatermark < 0.5"

`daguerre data VERB --help` says more about a verb, docs/data-tools.md about all of them.
"""
