//! Arguments and results are serde types; the request is a reference.

use calomel::Request;
use serde::{Deserialize, Serialize};

struct Neither;

#[derive(Serialize)]
struct Sent;

#[derive(Deserialize)]
struct Received;

#[calomel::service]
trait Values {
    fn argument(&self, plain: u8, neither: Neither);
    fn sent(&self, sent: Sent);
    fn received(&self, received: Vec<Received>);
    async fn result(&self) -> Neither;
    fn result_sent(&self) -> Result<Sent, String>;
    async fn request(&self, request: Request, number: u8) -> u8;
}

fn main() {}
