"""kvtransfer."""
