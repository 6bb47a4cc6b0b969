"""The KV manager with SmartGen in it: SGLang's Mooncake manager, our frames, our messages.

It adds no thread of its own to SGLang's. On P the bootstrap thread, on D the decode thread passes
every received message through `_filter` first: SmartGen messages are consumed there, extra frames
of SGLang's registration and metadata messages are read there, and everything else goes on
unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG, CommonKVReceiver
from sglang.srt.disaggregation.mooncake.conn import (
    KVArgsRegisterInfo,
    MooncakeKVManager,
    TransferInfo,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.utils.network import NetworkAddress

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.core.counts import counts
from sglang_smartgen.engine import runtime
from sglang_smartgen.engine.decode_side import DecodeSide
from sglang_smartgen.engine.frames import (
    METADATA_FRAMES,
    REGISTRATION_FRAMES,
    PeerFrames,
    RoomFrames,
    check_room,
    read_decode,
    read_prefill,
    sender_of,
)
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.engine.prefill_side import PrefillSide
from sglang_smartgen.engine.ranks import agreement_of_server
from sglang_smartgen.engine.room_status import SerialStatus
from sglang_smartgen.engine.selectors import load_selector
from sglang_smartgen.transfer.limited_log import LimitedLog
from sglang_smartgen.transfer.messages import (
    TAG,
    Alive,
    Endpoint,
    Failed,
    Fetch,
    Grant,
    Hello,
    Message,
    MessageError,
    OpenRoom,
    Release,
    Started,
    seal_behind,
    to_frames,
)
from sglang_smartgen.transfer.mooncake import MooncakeTransport
from sglang_smartgen.transfer.notices import Notices
from sglang_smartgen.transfer.push_room import PushRoom
from sglang_smartgen.transfer.rails.make import make_rails
from sglang_smartgen.transfer.rails.transport import RailsTransport
from sglang_smartgen.transfer.serve_channel import TransportSpec
from sglang_smartgen.transfer.transport import Region, TransportError

logger = logging.getLogger(__name__)

OPEN_GRACE_S = 60.0
"""What a room may wait longer than SGLang does, so that SGLang ends it with its own words."""


class SmartGenKVManager(SerialStatus, MooncakeKVManager):
    """MooncakeKVManager that also owns this rank's side of SmartGen."""

    def __init__(self, args: Any, disaggregation_mode: Any, *rest: Any, **named: Any) -> None:
        # Set before the base class starts its threads, which read them.
        self.prefill: PrefillSide | None = None
        self.decode: DecodeSide | None = None
        self.open_message: OpenRoom | None = None
        self.rails: RailsTransport | None = None
        self.aux_indices: dict[int, int | None] = {}
        self.causes: dict[int, str] = {}
        self.greeted: dict[str, Endpoint] = {}  # decode session -> where it listens
        self.sealer = runtime.sealer()
        self.notices = Notices()  # of the bootstrap thread
        super().__init__(args, disaggregation_mode, *rest, **named)

    def register_buffer_to_engine(self) -> None:
        """Register SGLang's buffers, then build our side: the base class starts threads next."""
        super().register_buffer_to_engine()
        if self.prefill is not None or self.decode is not None:
            return  # SGLang registers its buffers again after it had released its memory
        try:
            self._build_side(runtime.config(), runtime.facts())
        except ConfigError as error:
            print(f"SmartGen: {error}", file=sys.stderr, flush=True)
            raise

    def _build_side(self, config: SmartGenConfig, facts: ModelFacts) -> None:
        selector = load_selector(config, facts, self.server_args.model_path)
        runtime.set_agreement(agreement_of_server())
        own = MooncakeTransport(self.engine.engine, self.get_session_id())
        transport = own if config.transport == "mooncake" else self._over_rails(config, own)
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.prefill = PrefillSide(
                config=config,
                facts=facts,
                selector=selector,
                transport=transport,
                reply=self.send_control,
                outcome=self,
                process_transport=self._process_transport(config),
                path=runtime.path(),
                on_move=self.greet_all,
                tiered=self.server_args.enable_hierarchical_cache,
            )
            runtime.set_prefill_side(self.prefill)
        else:
            self.decode = DecodeSide(
                config=config,
                facts=facts,
                selector=selector,
                transport=transport,
                session=self.get_session_id(),
                reply=self._here(),
                send=self._send_to_prefill,
                rank=self.attn_tp_rank,
                fail_request=self.fail_waiting,
                open_limit_s=self.waiting_timeout + OPEN_GRACE_S,
                path=runtime.path(),
                agreement=runtime.agreement(),
            )
            runtime.set_decode_side(self.decode)
            self.decode.heartbeat.start()

    def _process_transport(self, config: SmartGenConfig) -> TransportSpec:
        """What SGLang starts its own engine with, for the engine of a server process."""
        protocol = envs.MOONCAKE_PROTOCOL.get()
        engine = self.engine
        host, devices = engine.hostname, engine.ib_device or ""
        return TransportSpec(config.transport, host, protocol, devices, rails=config.rails)

    def _over_rails(self, config: SmartGenConfig, own: MooncakeTransport) -> RailsTransport:
        """The configured rails, SGLang's engine among them, and on D its pool known to them all."""
        spec = self._process_transport(config)
        try:
            rails = make_rails(
                config.rails,
                spec.host,
                spec.protocol,
                spec.devices,
                engine=own,
                session=self.get_session_id(),
            )
            if self.disaggregation_mode == DisaggregationMode.DECODE:
                device = runtime.facts().keys[0].device.type != "cpu"
                pool = zip(self.kv_args.kv_data_ptrs, self.kv_args.kv_data_lens, strict=True)
                for address, length in sorted({piece for piece in pool if piece[1]}):
                    rails.adopt(Region(address, length), own, device=device)
        except TransportError as error:
            raise ConfigError(f"transport is 'rails', which fails here: {error}") from None
        self.rails = rails
        return rails

    # Messages in ----------------------------------------------------------------------------

    def _make_worker_recv(self, socket: Any, timeout_ms: int = 500) -> Callable[[], Any]:
        receive = super()._make_worker_recv(socket, timeout_ms)
        refused = LimitedLog(logger)
        filter_ = self._filter_prefill if self.prefill is not None else self._filter_decode

        def receive_filtered() -> Any:
            frames = receive()
            if frames is None:
                return None
            if self.prefill is not None and not sglang_can_read(frames):
                refused.warning("SmartGen: dropped a message of %d foreign frames", len(frames))
                return None
            try:
                return None if filter_(frames) else frames
            except Exception as error:
                # An exception would end SGLang's thread, and with it every later handshake.
                refused.warning("SmartGen: ignored (part of) a message: %s", error)
                if self.sealer is not None and self.prefill is not None:
                    self._refuse(frames, str(error))
                    return None
                # SGLang's own part still counts: without ours the request goes stock.
                return None if frames[0] == TAG else frames

        return receive_filtered

    def _refuse(self, frames: list[bytes], cause: str) -> None:
        """Tell whoever sent it. Nothing changes here: it could name anybody's room."""
        sender = sender_of(frames)
        if sender is None:
            return
        room, endpoint = sender
        reason = f"room {room}, prefill rank {self.attn_tp_rank}: {cause}"
        parts = self._encode_kv_status_message(
            bootstrap_room=room, status=KVPoll.Failed, failure_reason=reason
        )
        if len(parts) == 3:  # this backend leaves the reason out, but D reads one
            parts.append(reason.encode())
        with contextlib.suppress(ValueError):  # a host that is none
            address = NetworkAddress(endpoint.host, endpoint.port)
            self.notices.send(address.to_tcp(), parts, ipv6=address.is_ipv6)

    def _filter_prefill(self, frames: list[bytes]) -> bool:
        """True when the message was SmartGen's alone."""
        assert self.prefill is not None
        match read_prefill(frames, self.sealer, self._here()):
            case Fetch() | Grant() | Release() | Alive() as message:
                self.prefill.submit(message)
            case PeerFrames() as peer:
                self._add_peer(peer)
            case RoomFrames() as room:
                self._announce(room)
            case None:
                if frames[0].isdigit():
                    self.prefill.announced_stock(int(frames[0]))
                elif frames[0] == b"None" and len(frames) > REGISTRATION_FRAMES:
                    logger.warning(
                        "decode node speaks another SmartGen version; it gets full transfers"
                    )
            case other:
                raise MessageError(f"{type(other).__name__} is not for a prefill node")
        return frames[0] == TAG

    def _add_peer(self, peer: PeerFrames) -> None:
        assert self.prefill is not None
        if self.prefill.add_peer(peer.registration, peer.keys, peer.values):
            self.greeted[peer.registration.session] = peer.endpoint
            self.greet(peer.endpoint)

    def _here(self) -> Endpoint:
        """Where this rank listens, as its peers know it."""
        return Endpoint(self.local_ip, self.rank_port)

    def greet(self, endpoint: Endpoint) -> None:
        """Tell a decode rank that this P speaks SmartGen, and where its store is served."""
        assert self.prefill is not None
        bootstrap = self._here()
        serve = self.prefill.serve_endpoint or bootstrap
        epoch = self.prefill.epoch
        self.send_control(endpoint, Hello(bootstrap.host, bootstrap.port, serve, epoch))

    def greet_all(self) -> None:
        """The store is served elsewhere from now on."""
        for endpoint in list(self.greeted.values()):
            try:
                self.greet(endpoint)
            except Exception as error:
                logger.warning("decode at %s:%s: %s", endpoint.host, endpoint.port, error)

    def _announce(self, room: RoomFrames) -> None:
        assert self.prefill is not None
        peer = self.prefill.peer(room.session)
        if peer is not None:
            check_room(room.message, peer.registration)
        self.prefill.announce(room.message, room.session, room.endpoint, room.slots)

    def _filter_decode(self, frames: list[bytes]) -> bool:
        message = read_decode(frames, self.sealer, self._here())
        if message is None:
            return False
        if isinstance(message, Failed) and message.room in self.request_status:
            self.causes[message.room] = message.cause
        assert self.decode is not None
        self.decode.on_message(message)
        return True

    # Messages out ---------------------------------------------------------------------------

    def send_control(self, endpoint: Endpoint, message: Message) -> None:
        """P to D over SGLang's own status socket."""
        address = NetworkAddress(endpoint.host, endpoint.port)
        frames = to_frames(message, self.sealer, endpoint)
        self._send_multipart_locked(address.to_tcp(), frames, is_ipv6=address.is_ipv6)

    def _send_to_prefill(self, endpoint: Endpoint, message: Message) -> None:
        """D to P over SGLang's own bootstrap socket."""
        info = {"rank_ip": endpoint.host, "rank_port": endpoint.port}
        socket, lock = CommonKVReceiver._connect_to_bootstrap_server(info)
        with lock:
            socket.send_multipart(to_frames(message, self.sealer, endpoint))

    def build_receiver_registration_message(self) -> list[bytes]:
        """SGLang's registration with our frame behind it; stock P ignores the frame."""
        frames: list[bytes] = super().build_receiver_registration_message()
        assert self.decode is not None and len(frames) == REGISTRATION_FRAMES
        registration = self.decode.registration()
        if self.rails is not None:
            registration = msgspec.structs.replace(registration, rails=self.rails.card())
        return seal_behind(frames, registration, self.sealer)

    def build_receiver_metadata_message(self, **named: Any) -> list[bytes]:
        """SGLang's metadata with the room's OpenRoom behind it, when the receiver set one."""
        frames: list[bytes] = super().build_receiver_metadata_message(**named)
        assert len(frames) == METADATA_FRAMES
        return seal_behind(frames, self.open_message, self.sealer)

    # Outcome of P's pushes ------------------------------------------------------------------

    def live(self, room: int) -> bool:
        """False once the room has failed, was aborted or cleared."""
        return self.request_status.get(room, KVPoll.Failed) != KVPoll.Failed

    def hold_drain(self, room: int) -> None:
        """Writes for the room begin: SGLang must not acknowledge an abort before `ended`."""
        self._staging_outstanding[room] += 1

    def let_drain(self, room: int) -> None:
        """The room's writes are over; acknowledge an abort that waited for them."""
        self.aux_indices.pop(room, None)
        self._staging_outstanding[room] -= 1
        if self.enable_deferred_decode_kv_release:
            self._maybe_ack_drained_abort(room)
        if self._staging_outstanding.get(room, 0) <= 0:
            self._staging_outstanding.pop(room, None)

    def conclude(self, push: PushRoom) -> None:
        """The blocks are on D: SGLang's aux data to it, or the cause why that did not work."""
        room, session = push.entry.room, push.peer.registration.session
        info = self.transfer_infos.get(room, {}).get(session)
        if info is None:
            push.ended_early = "the request was cleared while its blocks were pushed"
        elif min(push.pushed) < push.entry.prompt_len:
            push.ended_early = "its blocks were not all pushed"
        else:
            table = self.decode_kv_args_table[session]
            if self.send_aux(info, self.aux_indices.get(room), table.dst_aux_ptrs) != 0:
                push.failure = f"aux data did not reach {session}"

    def start(self, push: PushRoom) -> None:
        """Started and SGLang's Success to D, in this order, or the cause why that did not work."""
        room = push.entry.room
        assert self.prefill is not None
        started = Started(
            room,
            push.entry.generation,
            push.proactive_bytes,
            push.metadata_bytes,
            push.prefill_s,
            push.entry.residual.left,
            self.prefill.epoch,
            push.entry.checksums() if push.verify else b"",
        )
        try:
            self.send_control(push.reply, started)
            status = self.conclude_transfer(bootstrap_room=room, status=KVPoll.Success)
        except Exception as error:
            logger.exception("room %s: hand-over to decode failed", room)
            push.ended_early = f"hand-over to {push.peer.registration.session} failed: {error}"
            return
        if status != KVPoll.Success:
            push.ended_early = "the request failed while its blocks were pushed"

    def ended(self, push: PushRoom) -> None:
        """The push writes nothing more; when it failed, both sides learn the cause."""
        room = push.entry.room
        try:
            if push.failure is not None or (push.late and push.ended_early):
                # Late bytes may still land: SGLang must not acknowledge an abort of this room.
                self._poison_unsettled_send(room)
            if cause := push.failure or push.ended_early:
                self.fail(room, cause, push)
        finally:
            self.let_drain(room)

    def fail(self, room: int, cause: str, push: PushRoom | None = None) -> None:
        """End the room on both sides, with room, rank and cause where D is known."""
        counts.failed(cause)
        reason = f"room {room}, prefill rank {self.attn_tp_rank}: {cause}"
        if push is not None:
            try:
                self.send_control(push.reply, Failed(room, push.entry.generation, reason))
            except Exception as error:
                logger.warning("%s; decode cannot be told: %s", reason, error)
        self.conclude_failure(bootstrap_room=room, failure_reason=reason)

    def fail_waiting(self, room: int, cause: str) -> None:
        """D ends a request that waits for its prefill."""
        if room in self.request_status:
            self.record_failure(room, f"room {room}, decode rank {self.attn_tp_rank}: {cause}")
            self.update_status(room, KVPoll.Failed)

    def apply_prefill_status(self, *, bootstrap_room: int, **named: Any) -> None:
        """A status of P; a Failed one gets the cause that P sent ahead of it."""
        cause = self.causes.pop(bootstrap_room, None)
        if cause is not None and named.get("failure_reason") is None:
            named["failure_reason"] = cause
        super().apply_prefill_status(bootstrap_room=bootstrap_room, **named)

    def _handle_abort_notification(self, msg: list[bytes]) -> bool:
        handled: bool = super()._handle_abort_notification(msg)
        if handled and self.prefill is not None and len(msg) > 1 and msg[1].isdigit():
            room = int(msg[1])
            if not self.live(room):
                self.prefill.cancel(room)
        return handled


def sglang_can_read(frames: list[bytes]) -> bool:
    """Whether a message to P is one that SGLang's bootstrap thread does not die of (or ours)."""
    try:
        if frames[0] == b"None":
            KVArgsRegisterInfo.from_zmq(frames)
        elif frames[0].isdigit():
            TransferInfo.from_zmq(frames)
        else:
            return frames[0] in (TAG, ABORT_TAG)
    except Exception:
        return False
    return True
