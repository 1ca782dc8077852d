//! Slow peers: connections held open with nothing sent, or with half a message.

use std::thread;
use std::time::{Duration, Instant};

use crate::adversary::Adversary;
use crate::common::wire::{self, Message, Stream};
use crate::over_both;
use crate::scene::{Scene, call_of_add, report};
use crate::support::*;

/// The victim's connect timeout of 2 s, and some slack.
const GIVEN_UP: Duration = Duration::from_secs(8);

/// 200 connections with half a handshake each are all disconnected after the connect timeout.
fn half_handshakes_are_disconnected_after_the_connect_timeout() {
    let _watchdog = Watchdog::start("slow::half_greetings");
    let scene = Scene::new();
    let (begin, served) = (Instant::now(), scene.served());
    let hello_bytes = wire::greeting(1, 1 << 20);
    let mut held: Vec<Adversary> = (0..200)
        .map(|n| {
            let mut adversary = Adversary::dial(&scene.address);
            adversary.bytes(&hello_bytes[..n % hello_bytes.len()]);
            adversary
        })
        .collect();
    scene.assert_serves();
    for adversary in &mut held {
        adversary.assert_hung_up();
    }
    assert!(begin.elapsed() < patience() * GIVEN_UP, "{:?}", begin.elapsed());
    drop(held);
    scene.assert_unharmed(&[]);
    assert!(scene.served() > served + 5);
    report("200 half handshakes, held open", "the victim hangs up", begin);
}

/// Sending a byte now and then does not extend the connect timeout.
fn handshake_byte_by_byte_is_disconnected_after_the_connect_timeout() {
    let _watchdog = Watchdog::start("slow::handshake_byte_by_byte_is_disconnected_after_the_connect_timeout");
    let scene = Scene::new();
    let begin = Instant::now();
    let hello_bytes = wire::greeting(1, 1 << 20);
    let mut adversary = Adversary::dial(&scene.address);
    for byte in &hello_bytes[..hello_bytes.len() - 1] {
        adversary.bytes(&[*byte]);
        scene.assert_serves();
        thread::sleep(Duration::from_millis(300));
        while adversary.listen() {}
        if adversary.channel.has_ended() {
            break;
        }
        assert!(begin.elapsed() < patience() * GIVEN_UP, "{:?}", begin.elapsed());
    }
    adversary.assert_hung_up();
    drop(adversary);
    scene.assert_unharmed(&[]);
    report("a handshake, byte by byte", "the victim hangs up", begin);
}

/// Half a frame, half a payload, half a call: they may take as long as they like, and delay no other peer.
fn half_sent_messages_delay_no_other_peer() {
    let _watchdog = Watchdog::start("slow::half_sent_messages_delay_no_other_peer");
    let scene = Scene::new();
    let begin = Instant::now();
    let frame = call_of_add(1);
    let mut held: Vec<Adversary> = (0..60)
        .map(|n| {
            let mut adversary = Adversary::after_handshake(&scene.address);
            match n % 3 {
                0 => drop(adversary.bytes(&frame[..1 + n % (frame.len() - 1)])),
                1 => drop(adversary.tell(&Message::call(1, "swallow", 1 << 20), &[])),
                _ => {
                    adversary.tell(&Message::call(1, "swallow", 1 << 20), &[]);
                    adversary.announce(Stream::Request, 1, 0, 1 << 19);
                }
            }
            adversary
        })
        .collect();
    // A frame that arrives byte by byte is served.
    let mut patient = Adversary::after_handshake(&scene.address);
    for byte in &frame {
        patient.bytes(&[*byte]);
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(patient.answer(1), Ok(vec![3]));
    scene.assert_serves();
    for adversary in &mut held {
        while adversary.listen() {}
    }
    drop((held, patient));
    scene.assert_unharmed(&[]);
    report("60 halves of frames, calls and payloads, held open", "the adversaries disconnect", begin);
}

over_both!(
    half_handshakes_are_disconnected_after_the_connect_timeout,
    handshake_byte_by_byte_is_disconnected_after_the_connect_timeout,
    half_sent_messages_delay_no_other_peer
);
