import time

import pytest

from kvtransfer.transports import select
from kvtransfer.transports.shm import ShmExporter
from kvtransfer.transports.tcp import TcpExporter
from tandem.config import TransferConfig
from tandem.errors import KVTransferError, LayoutMismatch
from tandem.layout import KVLayout
from tests.support.kv_pools import LAYOUT, SECRET, endpoint, pool, unused_shm_name
from tests.support.leaks import nothing_left_behind

BOTH = endpoint(shm_name="name", tcp_address="10.0.0.1:1", node_id="here")


@pytest.mark.parametrize(
    "transport, peer, node_id, expected",
    [
        ("auto", BOTH, "here", ["shm", "tcp"]),
        ("auto", BOTH, "elsewhere", ["tcp"]),
        ("auto", endpoint(shm_name="name", node_id="here"), "here", ["shm"]),
        ("auto", endpoint(tcp_address="10.0.0.1:1", node_id="here"), "here", ["tcp"]),
        ("auto", endpoint(shm_name="name", node_id="here"), "elsewhere", []),
        ("auto", endpoint(), "node", []),
        ("shm", BOTH, "elsewhere", ["shm"]),
        ("tcp", BOTH, "here", ["tcp"]),
    ],
)
def test_the_choice_follows_host_offer_and_configuration(transport, peer, node_id, expected):
    assert select.candidates(TransferConfig(transport=transport), peer, node_id) == expected


async def connect(region, peer, transport="auto"):
    config, deadline = TransferConfig(transport=transport), time.monotonic() + 20
    return await select.connect(config, peer, "node", region, SECRET, deadline)


async def test_one_host_gets_shm_and_falls_back_to_tcp_where_the_socket_cannot_be_reached():
    async with nothing_left_behind():
        with pool(seed=1) as source, pool() as target:
            shm = ShmExporter(source, SECRET, unused_shm_name())
            tcp = TcpExporter(source, SECRET, "127.0.0.1", lambda *_: True)
            shm_name, tcp_address = await shm.start(), await tcp.start()
            for peer, expected in [
                (endpoint(shm_name, tcp_address), "shm"),
                (
                    endpoint(unused_shm_name(), tcp_address),
                    "tcp",
                ),  # another network namespace: no socket
                (endpoint("", tcp_address), "tcp"),
            ]:
                transport = await connect(target, peer)
                assert transport.name == expected
                await transport.close()
            with pytest.raises(KVTransferError):
                await connect(target, endpoint(unused_shm_name(), tcp_address), transport="shm")
            with pytest.raises(KVTransferError):
                await connect(target, endpoint(shm_name, ""), transport="tcp")
            with pytest.raises(KVTransferError, match="no transport"):
                await connect(target, endpoint())
            await shm.close()
            await tcp.close()


async def test_pools_that_do_not_fit_are_not_tried_by_another_transport():
    other = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=LAYOUT.dtype)
    async with nothing_left_behind():
        with pool(seed=1) as source, pool(layout=other) as target:
            asked = []
            shm = ShmExporter(source, SECRET, unused_shm_name())
            tcp = TcpExporter(source, SECRET, "127.0.0.1", lambda *_: True)
            shm_name, tcp_address = await shm.start(), await tcp.start()
            make = select.make

            def noted(name, *rest):
                asked.append(name)
                return make(name, *rest)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(select, "make", noted)
                with pytest.raises(LayoutMismatch):
                    await connect(target, endpoint(shm_name, tcp_address))
            assert asked == ["shm"]
            await shm.close()
            await tcp.close()
