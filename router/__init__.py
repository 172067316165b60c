"""The front door and the owner of every request (①②③④⑨).

client -> service ①          gRPC; the only place that knows protobuf of the public API
validate ②         the one validator
admission ③        how many may live; the line of those who wait for workers, in order of arrival
lifecycle ④        one coroutine per choice: credit, reserve, prefill, first token, commit, steps, releases
placement        pure choice of a worker
fleet, session   one Session per worker; failure detector; which pairs to avoid
inbox            one attempt's messages between a session's reader and the lifecycle
answer ⑨           what was accepted: dedup, detokenizer, the end
client_stream      bounded buffer between the lifecycle and a client
directory                    which workers there are
app                          wiring, start and stop
"""
