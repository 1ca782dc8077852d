//! The transports' sides of links, by the protocol's numbers of these.

use slotmap::Key;

use crate::proto::LinkId;

/// A value for each link. The protocol uses the slot of a closed link again, while another thread may still be about to close it
/// here, or to attach it: each value that does not stay is handed back, to be closed. (A `SecondaryMap` would drop it.)
pub(super) struct LinkTable<T>(Vec<Option<(LinkId, T)>>);

impl<T> Default for LinkTable<T> {
    fn default() -> Self {
        LinkTable(Vec::new())
    }
}

/// The slot of a link, and which of the links in it this is: later ones have higher numbers.
fn slot(id: LinkId) -> (usize, u64) {
    let number = id.data().as_ffi();
    (number as u32 as usize, number >> 32)
}

impl<T> LinkTable<T> {
    pub(super) fn get(&self, id: LinkId) -> Option<&T> {
        self.0.get(slot(id).0)?.as_ref().filter(|(other, _)| *other == id).map(|(_, value)| value)
    }

    /// Returns the value that has no place: that of an earlier link in the same slot, or this one if it is the earlier one.
    pub(super) fn insert(&mut self, id: LinkId, value: T) -> Option<T> {
        let (index, number) = slot(id);
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        match &self.0[index] {
            Some((other, _)) if slot(*other).1 > number => Some(value),
            _ => self.0[index].replace((id, value)).map(|(_, earlier)| earlier),
        }
    }

    pub(super) fn remove(&mut self, id: LinkId) -> Option<T> {
        self.0.get_mut(slot(id).0)?.take_if(|(other, _)| *other == id).map(|(_, value)| value)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten().map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::*;

    #[test]
    fn every_value_is_found_or_handed_back() {
        let mut links = SlotMap::<LinkId, ()>::with_key();
        let earlier = links.insert(());
        links.remove(earlier);
        let later = links.insert(());
        assert_eq!(slot(earlier).0, slot(later).0, "the slot is used again");
        let mut table = LinkTable::default();
        assert_eq!(table.insert(earlier, "earlier"), None);
        // The later one is attached before the earlier one is closed.
        assert_eq!(table.insert(later, "later"), Some("earlier"));
        assert_eq!((table.get(earlier), table.get(later)), (None, Some(&"later")));
        // The earlier one is attached late.
        assert_eq!(table.insert(earlier, "earlier"), Some("earlier"));
        assert_eq!(table.remove(earlier), None);
        assert_eq!(table.values().collect::<Vec<_>>(), [&"later"]);
        assert_eq!(table.remove(later), Some("later"));
        assert_eq!(table.values().count(), 0);
    }
}
