use super::*;
use crate::index::types::Told;

fn publish(state: &mut State, number: u8) {
    let page = Publish {
        namespace: NamespaceSlot(0),
        key: KeyPrefix::from_bytes([number; 12]),
        parent: Parent::Head,
        place: Place {
            segment: SegmentId(0),
            start: u32::from(number),
            saved: 0,
        },
        proof: 0.into(),
        unproven: false,
        told: Told::default(),
    };
    let heat = state.draw().unwrap_or(Heat(0));
    let id = state
        .publish(&page, None, heat, Heat(u32::MAX), &mut Vec::new())
        .id;
    state.queue_if_leaf(id);
}

#[test]
fn pages_unused_for_a_billion_calls_become_one_age_and_the_newer_keep_their_order() {
    let mut state = State::new(0, Heat(0));
    publish(&mut state, 3);
    publish(&mut state, 2);
    *state.clock.get_mut() = u64::from(HEAT_END - 2);
    publish(&mut state, 1);
    publish(&mut state, 0);
    assert_eq!(state.draw(), None);
    assert_eq!(state.lower_heats(Heat(u32::MAX)), HEAT_END / 2);
    assert_eq!(state.draw(), Some(Heat(HEAT_END / 2)));
    assert_eq!(state.check(), Ok(()));
    let heats: Vec<u32> =
        std::iter::from_fn(|| state.evict(Heat(u32::MAX), |_, _| false, |_| false))
            .map(|page| page.worth.0)
            .collect();
    assert_eq!(heats, [0, 0, HEAT_END / 2 - 2, HEAT_END / 2 - 1]);
}
