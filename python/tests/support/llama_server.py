"""Runs llama-server with one slot in the environment of `examples/llama-larder/fetch`: MODEL SLOTS CONTEXT. Prints its address."""

import sys
import threading

import xllamacpp

model, slots, context = sys.argv[1:]
options = xllamacpp.CommonParams()
options.model.path = model
options.slot_save_path = slots
options.n_ctx = int(context)
options.n_parallel = 1
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 2
server = xllamacpp.Server(options)
print(server.listening_address, flush=True)
threading.Event().wait()
