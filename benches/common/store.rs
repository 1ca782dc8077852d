//! A server that pulls from its callers' memory into a buffer of its own, or pushes from it.

use std::sync::{Arc, Mutex};

use calomel::{Bulk, BulkMode, Engine, Exposed, Request};

/// The server keeps one exposed buffer at a time, until the client releases it.
pub fn define(engine: &Engine) -> calomel::Result<()> {
    let kept: Arc<Mutex<Option<Exposed<Vec<u8>>>>> = Arc::default();

    let slot = Arc::clone(&kept);
    engine.define("prepare", move |request: &Request, (len, fill): (usize, u8)| {
        let exposed = request.engine().expose(vec![fill; len], BulkMode::ReadWrite);
        *slot.lock().expect("no handler panicked") = Some(exposed.expect("the buffer is exposed"));
    })?;

    let slot = Arc::clone(&kept);
    engine.define("pull", move |request: &Request, bulk: Bulk| {
        let kept = slot.lock().expect("no handler panicked");
        bulk.on(request.endpoint()).pull_into(kept.as_ref().expect("prepared")).expect("the memory is pulled")
    })?;

    let slot = Arc::clone(&kept);
    engine.define("push", move |request: &Request, bulk: Bulk| {
        let kept = slot.lock().expect("no handler panicked");
        bulk.on(request.endpoint()).push_from(kept.as_ref().expect("prepared")).expect("the memory is pushed")
    })?;

    // Reclaims the buffer and returns whether every byte of it is `fill`.
    engine.define("finish", move |_: &Request, fill: u8| {
        let exposed = kept.lock().expect("no handler panicked").take();
        holds(&exposed.expect("prepared").reclaim(), fill)
    })?;
    Ok(())
}

pub fn holds(buffer: &[u8], fill: u8) -> bool {
    buffer.iter().all(|&byte| byte == fill)
}
