//! Calls of an empty procedure: sequential, rare, and pipelined.

use std::{
    collections::VecDeque,
    thread,
    time::{Duration, Instant},
};

use calomel::{Endpoint, Engine, Pending, Procedure, Request};

use super::{Outcome, Site, stats::Pace, timed};

pub fn define(engine: &Engine) -> calomel::Result<()> {
    engine.define("empty", |_: &Request, (): ()| ())?;
    Ok(())
}

/// Calls the server's empty procedure.
pub struct Caller {
    empty: Procedure<(), ()>,
    server: Endpoint,
}

impl Caller {
    pub fn new(site: &Site<'_>) -> Caller {
        Caller::of(&site.client, &site.peer)
    }

    pub fn of(client: &Engine, server: &Endpoint) -> Caller {
        Caller { empty: client.procedure("empty"), server: server.clone() }
    }

    pub fn call(&self) -> calomel::Result<()> {
        self.empty.on(&self.server).call(&())
    }

    pub fn round_trips(&self, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        timed(warm_up, count, samples, || self.call())?;
        Ok(())
    }

    pub fn rare_round_trips(&self, pause: Duration, count: usize, samples: &mut Vec<f64>) -> Outcome {
        for _ in 0..count {
            thread::sleep(pause);
            self.round_trips(0, 1, samples)?;
        }
        Ok(())
    }

    /// Makes so many calls, one after the other, behind each pause. A sample is the average of those of a burst.
    pub fn bursts(&self, pause: Duration, calls: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        for _ in 0..count {
            thread::sleep(pause);
            let begun = Instant::now();
            (0..calls).try_for_each(|_| self.call())?;
            samples.push(begun.elapsed().as_nanos() as f64 / calls as f64);
        }
        Ok(())
    }

    /// Keeps `window` calls in flight and waits for the oldest.
    pub fn sliding(&self, window: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        let mut flight = VecDeque::with_capacity(window);
        rate(window, count, samples, |starts| {
            for _ in 0..starts {
                flight.push_back(self.empty.on(&self.server).start(&())?);
            }
            flight.pop_front().expect("a call is in flight").wait()
        })
    }

    /// Keeps `window` calls in flight and waits for the one that is answered first.
    pub fn any_of(&self, window: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        let mut flight = Vec::with_capacity(window);
        rate(window, count, samples, |starts| {
            for _ in 0..starts {
                flight.push(self.empty.on(&self.server).start(&())?);
            }
            Pending::wait_any(&mut flight).1
        })
    }
}

/// Makes `count` calls; `step` starts the given number of calls and waits for one.
fn rate(window: usize, count: usize, samples: &mut Vec<f64>, mut step: impl FnMut(usize) -> calomel::Result<()>) -> Outcome {
    let mut pace = Pace::new(count / 10, samples);
    let mut started = 0;
    for done in 0..count {
        let starts = (done + window).min(count) - started;
        step(starts)?;
        started += starts;
        pace.reached(done + 1);
    }
    Ok(())
}
