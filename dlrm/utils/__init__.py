"""What every package may use: files, devices, messages, programs."""
