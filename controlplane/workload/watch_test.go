// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

var (
	job        = Reference{GroupResource: schema.GroupResource{Group: "batch", Resource: "jobs"}, Name: "train"}
	deployment = Reference{GroupResource: schema.GroupResource{Group: "apps", Resource: "deployments"}, Name: "web"}
)

// lookupTimeout limits a Find that must not wait.
const lookupTimeout = 10 * time.Second

// newLookup returns a Lookup for an API server without objects, and the kinds that the Lookup has started watches for.
// The API server calls list for each list of a kind.
func newLookup(list func(ctx context.Context, kind string) error) (l *Lookup, watches func() []string) {
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(batchv1.SchemeGroupVersion.WithKind("Job"), meta.RESTScopeNamespace)
	mapper.Add(appsv1.SchemeGroupVersion.WithKind("Deployment"), meta.RESTScopeNamespace)
	var mu sync.Mutex
	var started []string
	reader := fake.NewClientBuilder().WithScheme(clientscheme.Scheme).WithInterceptorFuncs(interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, l client.ObjectList, o ...client.ListOption) error {
			if err := list(ctx, l.GetObjectKind().GroupVersionKind().Kind); err != nil {
				return err
			}
			return c.List(ctx, l, o...)
		},
	}).Build()
	return &Lookup{
			APIReader: reader, Mapper: mapper,
			StartWatch: func(kind schema.GroupVersionKind, _ schema.GroupResource) error {
				mu.Lock()
				defer mu.Unlock()
				started = append(started, kind.Kind)
				return nil
			},
		}, func() []string {
			mu.Lock()
			defer mu.Unlock()
			return started
		}
}

// An API server that answers slowly for one kind delays no lookup of another kind.
func TestLookup_Find_whileAnotherKindIsListed(t *testing.T) {
	listing, release := make(chan struct{}), make(chan struct{})
	l, watches := newLookup(func(_ context.Context, kind string) error {
		if kind == "Job" {
			close(listing)
			<-release
		}
		return nil
	})
	slow, fast := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := l.Find(t.Context(), "default", job)
		slow <- err
	}()
	<-listing
	go func() {
		_, err := l.Find(t.Context(), "default", deployment)
		fast <- err
	}()
	select {
	case err := <-fast:
		if !errors.Is(err, ErrMissing) {
			t.Errorf("Deployment: got error %v, want %v", err, ErrMissing)
		}
	case <-time.After(lookupTimeout):
		t.Error("the lookup of a Deployment waits for the list of Jobs")
	}
	close(release)
	if err := <-slow; !errors.Is(err, ErrMissing) {
		t.Errorf("Job: got error %v, want %v", err, ErrMissing)
	}
	if got := watches(); len(got) != 2 {
		t.Errorf("got watches for %v, want two", got)
	}
}

// Several workers find objects of a kind for the first time at the same time.
func TestLookup_Find_startsOneWatchForParallelLookups(t *testing.T) {
	const workers = 8
	var lists sync.WaitGroup
	lists.Add(workers)
	l, watches := newLookup(func(ctx context.Context, _ string) error {
		lists.Done()
		all := make(chan struct{})
		go func() {
			lists.Wait()
			close(all)
		}()
		select {
		case <-all:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), lookupTimeout)
	defer cancel()
	var finds sync.WaitGroup
	for range workers {
		finds.Go(func() {
			if _, err := l.Find(ctx, "default", job); !errors.Is(err, ErrMissing) {
				t.Errorf("got error %v, want %v", err, ErrMissing)
			}
		})
	}
	finds.Wait()
	if got := watches(); len(got) != 1 {
		t.Errorf("got watches for %v, want one", got)
	}
}

// informers is a cache that calls synced when it has all objects of a kind.
type informers struct {
	cache.Informers
	synced func()
}

func (i informers) GetInformer(context.Context, client.Object, ...cache.InformerGetOption) (cache.Informer, error) {
	i.synced()
	return nil, nil
}

// An object that is deleted after it was read causes an event, so the watch begins before.
func TestLookup_Find_watchesBeforeReading(t *testing.T) {
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(batchv1.SchemeGroupVersion.WithKind("Job"), meta.RESTScopeNamespace)
	var steps []string
	step := func(name string) { steps = append(steps, name) }
	reader := fake.NewClientBuilder().WithScheme(clientscheme.Scheme).WithInterceptorFuncs(interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, k client.ObjectKey, o client.Object, g ...client.GetOption) error {
			step("read")
			return c.Get(ctx, k, o, g...)
		},
	}).Build()
	l := &Lookup{
		APIReader: reader, Mapper: mapper, Cache: informers{synced: func() { step("list") }},
		StartWatch: func(schema.GroupVersionKind, schema.GroupResource) error {
			step("watch")
			return nil
		},
	}
	if _, err := l.Find(t.Context(), "default", job); !errors.Is(err, ErrMissing) {
		t.Errorf("got error %v, want %v", err, ErrMissing)
	}
	if want := []string{"list", "watch", "read"}; !slices.Equal(steps, want) {
		t.Errorf("Find: got the steps %v, want %v", steps, want)
	}
}
