"""Formats of weights files behind one small protocol, under the tensor names of Hugging Face's Llama."""
