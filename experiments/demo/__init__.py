"""The bundled demo: two checkpoints of one training run, 200 held-out tasks, and the script that makes them."""
