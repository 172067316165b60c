# The two commands: `make demo` and `make test`. Both make .venv first.
PY := .venv/bin/python
.PHONY: proto
proto:  ## regenerate tandem/v1 from proto/
	$(PY) -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/tandem/v1/*.proto
