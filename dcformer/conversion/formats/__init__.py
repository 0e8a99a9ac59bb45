"""One file a format: what is stored in a checkpoint of it, and the plan that turns it into a model.

    maxtext.py               the authors' MaxText fork: arrays to parameters
      maxtext_architecture.py  the model's configuration, from the arrays and the training YAML
      maxtext_yaml.py          the training YAML
    pax.py                   the authors' PAX checkpoints
    authors_torch.py         the authors' torch files, and folders of ours

What these are stored in:

    orbax.py, orbax_steps.py, orbax_writer.py   checkpoints of JAX in folders of steps, read and written
    zarr_array.py            an array of such a checkpoint
    numpy_files.py           .npz and .npy
    transformers_folder.py   folders with config.json and weights
    config_file.py           config.json
    safetensors_file.py      .safetensors
    torch_file.py            .bin of torch.save

`../detect.py` tells which of the three a checkpoint is. A new format is a file here with a function that returns its
`Contents`, one that returns its `Plan`, and a line there.
"""
